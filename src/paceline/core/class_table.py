"""How the images of each class were classified, and the two CSV tables that show it. It knows no tensors."""

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from paceline.core.csv_cells import from_cell, to_cell
from paceline.core.errors import PacelineError

IMBALANCE_RATIO: Final = 10
"""How many times the images of the rarest class the most frequent one may have before accuracy hides the rare ones."""
_CORNER = "true\\predicted"
_COLUMNS = ("class", "images", "correct", "accuracy")


@dataclass(frozen=True)
class ClassCount:
    """A class: how many images it has, and how many of them were recognised."""

    name: str
    images: int
    correct: int

    @property
    def accuracy(self) -> float:
        """Share of the class's images that were recognised, 0 to 1. Only for a class that has images."""
        return self.correct / self.images


@dataclass(frozen=True)
class ClassTable:
    """One evaluation, class by class.

    `confusion` has a row for each true class and a column for each predicted one; it is empty where there are too
    many classes for such a table.
    """

    classes: tuple[ClassCount, ...]
    confusion: tuple[tuple[int, ...], ...] = ()

    @property
    def is_uneven(self) -> bool:
        """Whether some class has more than `IMBALANCE_RATIO` times the images of another; those without images do not count."""
        return is_imbalanced(each.images for each in self.classes)


def is_imbalanced(counts: Iterable[int]) -> bool:
    """Return whether the largest of `counts` is more than `IMBALANCE_RATIO` times the smallest one that is not 0."""
    some = [each for each in counts if each]
    return bool(some) and max(some) > IMBALANCE_RATIO * min(some)


def printable_class_name(name: str) -> str:
    """Return `name` with undecodable bytes of a folder's name written out, so that any file and terminal takes it."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def error_rate_key(each: ClassCount) -> tuple[float, int]:
    """Return what sorts classes the worst first: by accuracy, and of equals that of more images, which says more."""
    return each.accuracy, -each.images


def worst_classes(classes: Iterable[ClassCount], number: int) -> list[ClassCount]:
    """Return up to `number` classes of the lowest accuracy, as `error_rate_key` orders them; none that has no mistake."""
    mistaken = [each for each in classes if each.correct < each.images]
    return sorted(mistaken, key=error_rate_key)[:number]


def classes_csv(table: ClassTable) -> str:
    """Return a row a class; the accuracy of a class without images is left empty."""
    rows = [
        [to_cell(each.name), each.images, each.correct, each.accuracy if each.images else ""] for each in table.classes
    ]
    return _to_csv([_COLUMNS, *rows])


def confusion_csv(table: ClassTable) -> str:
    """Return the confusion matrix, a row a true class, with the names of the classes on top and on the left."""
    names = [to_cell(each.name) for each in table.classes]
    rows = [[name, *row] for name, row in zip(names, table.confusion, strict=True)]
    return _to_csv([[_CORNER, *names], *rows])


def read_classes_csv(text: str) -> tuple[ClassCount, ...]:
    """Return what `classes_csv` wrote. Raise `PacelineError` for anything else."""
    try:
        rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        return tuple(ClassCount(from_cell(row["class"]), int(row["images"]), int(row["correct"])) for row in rows)
    except (KeyError, TypeError, ValueError, csv.Error):
        raise PacelineError("is not a table of classes") from None


def _to_csv(rows: Iterable[Iterable[object]]) -> str:
    table = io.StringIO(newline="")
    csv.writer(table).writerows(rows)
    return table.getvalue()
