"""`paceline predict`: classify image files, and print a table, CSV or JSON."""

import contextlib
import csv
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from paceline.cli.evaluate import warn_missing_final, warn_uncalibrated
from paceline.cli.options import PredictOptions
from paceline.cli.ranks import enter_world
from paceline.cli.start_line import announce
from paceline.core.csv_cells import to_cell
from paceline.core.errors import RecipeError, suggest_similar
from paceline.core.imports import fast_imports
from paceline.core.run_dir import RunDir
from paceline.core.units import count, share
from paceline.data.files import printable
from paceline.inference.images import UnreadableImage

if TYPE_CHECKING:
    from paceline.inference.classifier import Classifier
    from paceline.inference.predict import Guess, InputImage, Prediction

ShowImage = Callable[["Prediction | UnreadableImage"], None]
_DIGITS = 6
FORMATS = ("auto", "table", "csv", "jsonl")
_SOME_UNREAD_CODE = 1
_DEFAULT_REJECT_RATE = 0.05


def predict(options: PredictOptions) -> int:
    """Run `paceline predict`; return the exit code, 1 if an image could not be read."""
    _check_options(options)
    if options.as_json and options.format != "auto":
        raise RecipeError(f"--format: {options.format} has no effect with --json (leave one of them out)")
    rate = None if options.reject is None else _parse_rate(options.reject)
    RunDir.existing(options.run)
    with announce(f"loading {options.run}"), fast_imports():
        from paceline.core.host import rank_cores
        from paceline.inference.classifier import load_classifier
        from paceline.inference.images import STDIN_NAME, list_images
        from paceline.inference.predict import load_images
        from paceline.inference.predict import predict_images as predicted
        from paceline.inference.reference import Rejector
        from paceline.parallel.device import set_threads

    world = enter_world()
    classifier = load_classifier(options.run, options.checkpoint, options.device, trust_code=options.trust_code)
    if options.checkpoint == "last":
        warn_missing_final(RunDir(classifier.run), classifier.checkpoint)
    warn_uncalibrated(RunDir(classifier.run), classifier)
    rejector = Rejector.load(classifier, rate) if rate is not None else None
    set_threads(
        classifier.recipe.parallel, world
    )  # as in evaluation: the number of threads can change the order of sums
    default = 5 if classifier.threshold is None else len(classifier.classes)
    top = min(options.top or default, len(classifier.classes))
    arrays = not classifier.preprocessing.pixel_format.is_photo
    paths = list_images(options.images, _open_stdin() if STDIN_NAME in options.images else (), arrays=arrays)
    num_unread = 0
    with (
        build_printer(
            "json" if options.as_json else options.format, classifier.checkpoint, top, rejects=rejector is not None
        ) as show,
        contextlib.closing(load_images(classifier, paths, cores=rank_cores(world))) as pictures,
        _explaining(options, classifier, pictures) as (images, explain),
    ):
        for each in predicted(classifier, images, batch_size=options.batch_size, top=top, rejector=rejector):
            num_unread += isinstance(each, UnreadableImage)
            show(each)
            explain(each)
    return _SOME_UNREAD_CODE if num_unread else 0


def _parse_rate(text: str) -> float:
    """Return the share of images to reject. Raise `RecipeError` if `text` is none."""
    if text == "auto":
        return _DEFAULT_REJECT_RATE
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < 1:
        raise RecipeError(f"--reject: {text!r} is not a share of images (write auto or a number such as 0.01)")
    return rate


def _explaining(
    options: PredictOptions, classifier: "Classifier", images: Iterable["InputImage | UnreadableImage"]
) -> contextlib.AbstractContextManager["tuple[Iterable[InputImage | UnreadableImage], ShowImage]"]:
    """Return a context that yields `images` and a function for each result, which explains it if `--explain` is set."""
    if options.explain is None:
        return contextlib.nullcontext((images, lambda each: None))
    from paceline.cli.explain import explain_predictions

    return explain_predictions(classifier, images, options.explain.expanduser(), options.layer)


def _open_stdin() -> BinaryIO:
    if sys.stdin is None:
        raise RecipeError("-: reads paths from stdin, which is closed (name files or folders)")
    return sys.stdin.buffer


def _check_options(options: PredictOptions) -> None:
    if not options.images:
        raise RecipeError("predict: no image was named (name files or folders, or - for paths on stdin)")
    if options.layer != "auto" and options.explain is None:
        raise RecipeError(f"--layer: {options.layer} has no effect without --explain (add --explain FOLDER)")
    if options.format not in FORMATS:
        hint = suggest_similar(options.format, FORMATS)
        raise RecipeError(f"--format: {options.format!r} is not known{hint} (use {', '.join(FORMATS)})")


def build_printer(
    format: str, checkpoint: Path, top: int, *, rejects: bool = False
) -> contextlib.AbstractContextManager[ShowImage]:
    """Return a context that yields a function to print each image's `top` classes, and whether it is rejected.

    `format` is table, csv, jsonl, json (one document) or auto. An unreadable image is a line on stderr, and a row
    except in tables.
    """
    match format:
        case "json":
            return _print_json(checkpoint)
        case "jsonl":
            return _print_jsonl()
        case "table":
            return _print_table_at_end(checkpoint)
        case "auto" if sys.stdout.isatty():
            return _print_table_at_end(checkpoint)
    return _print_csv(top, rejects=rejects)


def prediction_row(each: "Prediction | UnreadableImage") -> dict[str, Any]:
    """Return {image, predictions: [{class, probability}]}, or {image, error}; with a rejector, its answer too.

    `image` is the path unescaped; `os.fsencode` restores its bytes.
    """
    image = os.fspath(each.path)
    if isinstance(each, UnreadableImage):
        return {"image": image, "error": each.reason}
    guesses = [{"class": guess.name, "probability": _round(guess.probability)} for guess in each.guesses]
    row = {"image": image, "predictions": guesses}
    return row if each.distance is None else {**row, "rejected": each.is_rejected, "distance": _round(each.distance)}


@contextlib.contextmanager
def _print_json(checkpoint: Path) -> Iterator[ShowImage]:
    rows: list[dict[str, Any]] = []

    def show(each: "Prediction | UnreadableImage") -> None:
        _print_unread(each)
        rows.append(prediction_row(each))

    yield show
    num_unread = sum("error" in row for row in rows)
    origin = {"run": printable(checkpoint.parent.parent), "checkpoint": checkpoint.name}
    document = {**origin, "images": len(rows) - num_unread, "errors": num_unread, "rows": rows}
    print(json.dumps(document, indent=2, allow_nan=False))


@contextlib.contextmanager
def _print_jsonl() -> Iterator[ShowImage]:
    def show(each: "Prediction | UnreadableImage") -> None:
        _print_unread(each)
        # Flush: a pipe gets each result as soon as it is known.
        print(json.dumps(prediction_row(each), allow_nan=False), flush=True)

    yield show


@contextlib.contextmanager
def _print_csv(top: int, *, rejects: bool) -> Iterator[ShowImage]:
    """Print a row per image: path, `top` pairs of class and probability, with `rejects` the answer to it, error."""
    table = csv.writer(sys.stdout, lineterminator="\n")
    pairs = ((f"class_{number}", f"probability_{number}") for number in range(1, top + 1))
    more = ["rejected", "distance"] if rejects else []
    table.writerow(["image", *(column for pair in pairs for column in pair), *more, "error"])

    def show(each: "Prediction | UnreadableImage") -> None:
        _print_unread(each)
        name = to_cell(os.fspath(each.path))
        if isinstance(each, UnreadableImage):
            table.writerow([name, *[""] * (2 * top + len(more)), to_cell(each.reason)])
        else:
            cells = [cell for guess in each.guesses for cell in (to_cell(guess.name), _round(guess.probability))]
            answer = [int(each.is_rejected), _round(each.distance)] if each.distance is not None else []
            table.writerow([name, *cells, *[""] * (2 * top - len(cells)), *answer, ""])
        sys.stdout.flush()

    yield show


@contextlib.contextmanager
def _print_table_at_end(checkpoint: Path) -> Iterator[ShowImage]:
    from rich.console import Console

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    predictions: list[Prediction] = []
    with console.status("") if console.is_terminal else contextlib.nullcontext() as status:

        def show(each: "Prediction | UnreadableImage") -> None:
            if isinstance(each, UnreadableImage):
                console.print(_unread_text(each), soft_wrap=True)
                return
            predictions.append(each)
            if status is not None:
                status.update(count(len(predictions), "image"))

        yield show
    if predictions:
        _print_predictions(predictions, f"{printable(checkpoint.parent.parent.name)}, {checkpoint.name}")


def _print_predictions(predictions: list["Prediction"], title: str) -> None:
    from paceline.cli.tables import print_table

    if len(predictions) == 1:
        rows = [[printable(guess.name), share(guess.probability)] for guess in predictions[0].guesses]
        if predictions[0].is_rejected:
            print("rejected: unlike the training images")
        print_table(f"{printable(predictions[0].path)} ({title})", ("class", "probability"), rows)
        return
    many = [
        [
            printable(each.path),
            *([printable(each.guesses[0].name), share(each.guesses[0].probability)] if each.guesses else ["", ""]),
            "rejected: unlike the training images" if each.is_rejected else _other_guesses(each.guesses[1:]),
        ]
        for each in predictions
    ]
    print_table(f"{count(len(predictions), 'image')} ({title})", ("image", "class", "probability", "then"), many,
                text_columns=("class", "then"))  # fmt: skip


def _other_guesses(guesses: tuple["Guess", ...]) -> str:
    return ", ".join(f"{printable(guess.name)} {share(guess.probability)}" for guess in guesses)


def _round(value: float) -> float:
    """Return a value with the digits that float32 guarantees."""
    return float(f"{value:.{_DIGITS}g}")


def _print_unread(each: "Prediction | UnreadableImage") -> None:
    if isinstance(each, UnreadableImage):
        print(_unread_text(each), file=sys.stderr, flush=True)


def _unread_text(unread: UnreadableImage) -> str:
    return f"error: {printable(unread.path)}: {printable(' '.join(unread.reason.split()))}"
