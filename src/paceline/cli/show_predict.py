"""Print predictions: rows as they arrive for programs, a table at the end for people; unreadable images on stderr."""

import contextlib
import csv
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.tables import print_table
from paceline.core.csv_cells import to_cell
from paceline.core.units import count, share
from paceline.data.sources.places import printable
from paceline.inference.listing import UnreadableImage

if TYPE_CHECKING:  # imports torch
    from paceline.inference.ranking import Guess, Prediction

ShowImage = Callable[["Prediction | UnreadableImage"], None]
_DIGITS = 6


def build_printer(format: str, checkpoint: Path, top: int) -> contextlib.AbstractContextManager[ShowImage]:
    """Return a context that yields a function to print each image's `top` classes in `format`.

    `format` is table, csv, jsonl, json (one document) or auto. An image that could not be read is a line on stderr, and
    a row except in tables.
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
    return _print_csv(top)


def prediction_row(each: "Prediction | UnreadableImage") -> dict[str, Any]:
    """Return a prediction as plain values: {image, predictions: [{class, probability}]}, or {image, error}.

    `image` is the path unescaped: JSON can hold any, and `os.fsencode` restores its bytes.
    """
    image = os.fspath(each.path)
    if isinstance(each, UnreadableImage):
        return {"image": image, "error": each.reason}
    guesses = [{"class": guess.name, "probability": _rounded_probability(guess)} for guess in each.guesses]
    return {"image": image, "predictions": guesses}


@contextlib.contextmanager
def _print_json(checkpoint: Path) -> Iterator[ShowImage]:
    """Print one JSON object at the end."""
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
    """Print one JSON object per line."""

    def show(each: "Prediction | UnreadableImage") -> None:
        _print_unread(each)
        print(json.dumps(prediction_row(each), allow_nan=False), flush=True)

    yield show


@contextlib.contextmanager
def _print_csv(top: int) -> Iterator[ShowImage]:
    """Print one row per image: path, `top` pairs of class and probability, error."""
    table = csv.writer(sys.stdout, lineterminator="\n")
    pairs = ((f"class_{number}", f"probability_{number}") for number in range(1, top + 1))
    table.writerow(["image", *(column for pair in pairs for column in pair), "error"])

    def show(each: "Prediction | UnreadableImage") -> None:
        _print_unread(each)
        name = to_cell(os.fspath(each.path))
        if isinstance(each, UnreadableImage):
            table.writerow([name, *[""] * (2 * top), to_cell(each.reason)])
        else:
            cells = (cell for guess in each.guesses for cell in (to_cell(guess.name), _rounded_probability(guess)))
            table.writerow([name, *cells, ""])
        sys.stdout.flush()

    yield show


@contextlib.contextmanager
def _print_table_at_end(checkpoint: Path) -> Iterator[ShowImage]:
    """Print a table at the end; meanwhile a terminal shows the number of images."""
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
    if len(predictions) == 1:
        rows = [[printable(guess.name), share(guess.probability)] for guess in predictions[0].guesses]
        print_table(f"{printable(predictions[0].path)} ({title})", ("class", "probability"), rows)
        return
    many = [
        [
            printable(each.path),
            printable(each.guesses[0].name),
            share(each.guesses[0].probability),
            _other_guesses(each.guesses[1:]),
        ]
        for each in predictions
    ]
    print_table(f"{count(len(predictions), 'image')} ({title})", ("image", "class", "probability", "then"), many,
                text_columns=("class", "then"))  # fmt: skip


def _other_guesses(guesses: tuple["Guess", ...]) -> str:
    return ", ".join(f"{printable(guess.name)} {share(guess.probability)}" for guess in guesses)


def _rounded_probability(guess: "Guess") -> float:
    """Return the probability rounded to the digits that float32 guarantees."""
    return float(f"{guess.probability:.{_DIGITS}g}")


def _print_unread(each: "Prediction | UnreadableImage") -> None:
    if isinstance(each, UnreadableImage):
        print(_unread_text(each), file=sys.stderr, flush=True)


def _unread_text(unread: UnreadableImage) -> str:
    return f"error: {printable(unread.path)}: {printable(' '.join(unread.reason.split()))}"
