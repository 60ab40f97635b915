"""`paceline predict`: classify image files with a run's model."""

import contextlib
import sys
from pathlib import Path
from typing import BinaryIO

from paceline.cli.evaluate import note_missing_end
from paceline.cli.ranks import enter_world
from paceline.core.errors import RecipeError, near_miss
from paceline.core.rundir import RunDir

FORMATS = ("auto", "table", "csv", "jsonl")
_SOME_UNREAD = 1


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
    _check(images, top, batch_size, format)
    if as_json and format != "auto":
        raise RecipeError(f"--format: {format} has no effect with --json (leave one of them out)")
    from paceline.cli.show_predict import build_show
    from paceline.core.limits import rank_cores
    from paceline.inference.classifier import load_classifier
    from paceline.inference.listing import FROM_LINES, Unread, listed
    from paceline.inference.ranking import predict as predicted
    from paceline.inference.reading import read_pictures
    from paceline.parallel.device import set_threads

    world = enter_world()
    classifier = load_classifier(run, checkpoint, device, own_code=own_code)
    if checkpoint == "last":
        note_missing_end(RunDir(classifier.run), classifier.checkpoint)
    if classifier.preprocessing.channels not in (1, 3):
        number = classifier.preprocessing.channels
        raise RecipeError(
            f"{run}: reads {number} channels, and files have 1 or 3 (use Classifier.probabilities in Python)"
        )
    set_threads(
        classifier.recipe.parallel, world
    )  # as in evaluation: the number of threads can change the order of sums
    top = min(top, len(classifier.classes))
    paths = listed(images, _lines_of_stdin() if FROM_LINES in images else ())
    num_unread = 0
    with (
        build_show("json" if as_json else format, classifier.checkpoint, top) as show,
        contextlib.closing(
            read_pictures(classifier, paths, threads=rank_cores(world), ahead=2 * batch_size)
        ) as pictures,
    ):
        for each in predicted(classifier, pictures, batch_size=batch_size, top=top):
            num_unread += isinstance(each, Unread)
            show(each)
    return _SOME_UNREAD if num_unread else 0


def _lines_of_stdin() -> BinaryIO:
    """Return the binary stdin. Raise `RecipeError` if it is closed."""
    if sys.stdin is None:
        raise RecipeError("-: reads paths from stdin, which is closed (name files or folders)")
    return sys.stdin.buffer


def _check(images: list[str], top: int, batch_size: int, format: str) -> None:
    if not images:
        raise RecipeError("predict: no image was named (name files or folders, or - for paths on stdin)")
    for name, value in (("--top", top), ("--batch-size", batch_size)):
        if value < 1:
            raise RecipeError(f"{name}: {value} is less than 1 (write 1, 2, ...)")
    if format not in FORMATS:
        raise RecipeError(f"--format: {format!r} is not known{near_miss(format, FORMATS)} (use {', '.join(FORMATS)})")
