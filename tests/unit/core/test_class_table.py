"""`ClassTable` in `core.results`: tables read back with class names of any characters."""

import csv
import io

import pytest

from paceline.core.csv_cells import to_cell
from paceline.core.errors import PacelineError
from paceline.core.results import (
    CalibrationBin,
    ClassCount,
    ClassTable,
    calibration_csv,
    classes_csv,
    confusion_csv,
    printable_class_name,
    read_calibration_csv,
    read_classes_csv,
    worst_classes,
)

AWKWARD = ("a,b", "=1+1", 'say "x"', "two\nlines", " edge ", "é", "")


def table_of(names: tuple[str, ...]) -> ClassTable:
    classes = tuple(ClassCount(name, 10, number) for number, name in enumerate(names))
    size = len(names)
    return ClassTable(classes, tuple(tuple(row * size + column for column in range(size)) for row in range(size)))


def test_classes_read_back_whatever_they_are_called() -> None:
    table = table_of(AWKWARD)
    assert read_classes_csv(classes_csv(table)) == table.classes


def test_a_class_without_images_has_no_accuracy() -> None:
    text = classes_csv(ClassTable((ClassCount("a", 4, 3), ClassCount("b", 0, 0))))
    assert text.splitlines() == ["class,images,correct,accuracy", "a,4,3,0.75", "b,0,0,"]


def test_the_confusion_matrix_is_named_on_both_sides() -> None:
    rows = list(csv.reader(io.StringIO(confusion_csv(table_of(AWKWARD)), newline="")))
    assert rows[0] == ["true\\predicted", *map(to_cell, AWKWARD)]
    assert [row[0] for row in rows[1:]] == [*map(to_cell, AWKWARD)]
    assert [[int(cell) for cell in row[1:]] for row in rows[1:]] == [
        [7 * row + col for col in range(7)] for row in range(7)
    ]


def test_the_worst_classes_come_lowest_first_and_perfect_or_empty_ones_never() -> None:
    counts = {"a": (10, 9), "b": (4, 4), "c": (2, 1), "d": (0, 0), "e": (100, 10), "f": (10, 5)}
    classes = [ClassCount(name, *pair) for name, pair in counts.items()]
    assert [each.name for each in worst_classes(classes, 3)] == ["e", "f", "c"]
    assert [each.name for each in worst_classes(classes, 9)] == ["e", "f", "c", "a"]


def test_of_equally_bad_classes_that_of_more_images_comes_first() -> None:
    counts = {"a": (1, 0), "b": (13, 0), "c": (2, 0), "d": (10, 5), "e": (20, 10), "f": (3, 0), "g": (3, 0)}
    classes = [ClassCount(name, *pair) for name, pair in counts.items()]
    assert [each.name for each in worst_classes(classes, 9)] == ["b", "f", "g", "c", "a", "e", "d"]


def test_a_folder_name_that_is_no_text_is_written_out() -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert printable_class_name(name) == "caf\\udce9"
    assert printable_class_name("café") == "café"


@pytest.mark.parametrize("text", ["class,images\na,1\n", "class,images,correct\na,x,1\n", "class,images,correct\na\n"])
def test_another_table_is_refused(text: str) -> None:
    with pytest.raises(PacelineError, match="is not a table of classes"):
        read_classes_csv(text)


BINS = (CalibrationBin(0.0, 1 / 3, 0, 0, 0.0), CalibrationBin(1 / 3, 1.0, 7, 5, 2 / 3))


def test_calibration_bins_read_back() -> None:
    text = calibration_csv(ClassTable((), calibration=BINS))
    assert text.splitlines()[1] == "0.0,0.3333333333333333,0,0,,"
    assert read_calibration_csv(text) == BINS


@pytest.mark.parametrize("row", ["0,1,3,4,1,0.5", "0,1,-1,0,0,0.5", "0,1,3,2,1,nan", "0.5,0.5,3,2,1,0.5", "0,1,3", "x"])
def test_impossible_calibration_bins_are_refused(row: str) -> None:
    with pytest.raises(PacelineError):
        read_calibration_csv(f"above,up_to,images,correct,accuracy,confidence\n{row}\n")
