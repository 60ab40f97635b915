"""`paceline predict`: classify image files with a run's model."""

import contextlib
import sys
from pathlib import Path
from typing import BinaryIO

from paceline.cli.evaluate import warn_missing_final
from paceline.cli.ranks import enter_world
from paceline.core.errors import RecipeError, suggest_similar
from paceline.core.rundir import RunDir

FORMATS = ("auto", "table", "csv", "jsonl")
_SOME_UNREAD_CODE = 1


def predict(
    run: Path,
    images: list[str],
    *,
    top: int,
    checkpoint: str,
    batch_size: int,
    format: str,
    device: str,
    own_code: bool = False,
    as_json: bool,
) -> int:
    """Run `paceline predict`; return the exit code, 1 if an image could not be read.

    `images` are files, folders, and `-` for paths on stdin. `format` auto is a table on a terminal, else CSV.
    """
    _check_args(images, top, batch_size, format)
    if as_json and format != "auto":
        raise RecipeError(f"--format: {format} has no effect with --json (leave one of them out)")
    from paceline.cli.show_predict import build_printer
    from paceline.core.limits import rank_cores
    from paceline.inference.classifier import load_classifier
    from paceline.inference.listing import STDIN_NAME, UnreadableImage, list_images
    from paceline.inference.ranking import predict_images as predicted
    from paceline.inference.reading import read_images
    from paceline.parallel.device import set_threads

    world = enter_world()
    classifier = load_classifier(run, checkpoint, device, own_code=own_code)
    if checkpoint == "last":
        warn_missing_final(RunDir(classifier.run), classifier.checkpoint)
    if classifier.preprocessing.channels not in (1, 3):
        number = classifier.preprocessing.channels
        raise RecipeError(
            f"{run}: reads {number} channels, and files have 1 or 3 (use Classifier.probabilities in Python)"
        )
    set_threads(
        classifier.recipe.parallel, world
    )  # as in evaluation: the number of threads can change the order of sums
    top = min(top, len(classifier.classes))
    paths = list_images(images, _open_stdin() if STDIN_NAME in images else ())
    num_unread = 0
    with (
        build_printer("json" if as_json else format, classifier.checkpoint, top) as show,
        contextlib.closing(
            read_images(classifier, paths, threads=rank_cores(world), num_ahead=2 * batch_size)
        ) as pictures,
    ):
        for each in predicted(classifier, pictures, batch_size=batch_size, top=top):
            num_unread += isinstance(each, UnreadableImage)
            show(each)
    return _SOME_UNREAD_CODE if num_unread else 0


def _open_stdin() -> BinaryIO:
    """Return the binary stdin. Raise `RecipeError` if it is closed."""
    if sys.stdin is None:
        raise RecipeError("-: reads paths from stdin, which is closed (name files or folders)")
    return sys.stdin.buffer


def _check_args(images: list[str], top: int, batch_size: int, format: str) -> None:
    if not images:
        raise RecipeError("predict: no image was named (name files or folders, or - for paths on stdin)")
    for name, value in (("--top", top), ("--batch-size", batch_size)):
        if value < 1:
            raise RecipeError(f"{name}: {value} is less than 1 (write 1, 2, ...)")
    if format not in FORMATS:
        raise RecipeError(
            f"--format: {format!r} is not known{suggest_similar(format, FORMATS)} (use {', '.join(FORMATS)})"
        )
