"""What a model gets wrong: captions, pairs, per-class metrics as scikit-learn's, and the reliability diagram."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support

from paceline.core.results import CalibrationBin, ClassCount
from paceline.report.document import BarChart, ChartRow, Gallery, Table, Thumbnail
from paceline.report.mistake_sections import class_table, limit_thumbnails, mistakes_section
from paceline.report.read_run import RunData, SavedImage

NAMES = ("cat", "dog", "cow")
CONFUSION = ((7, 2, 0), (4, 5, 0), (1, 0, 0))
CLASSES = tuple(ClassCount(name, sum(row), row[i]) for i, (name, row) in enumerate(zip(NAMES, CONFUSION, strict=True)))
RECORD = {"name": "val/1.png", "true": "dog", "predicted": "cat", "confidence": 0.63, "loss": 4.2}
PICTURE = "data:image/png;base64,AAAA"


def blocks_of(kind, **fields):
    section = mistakes_section(RunData(Path("run"), **fields))
    assert section is not None
    return [block for block in section.blocks if isinstance(block, kind)]


def test_a_run_without_evaluation_has_no_section() -> None:
    assert mistakes_section(RunData(Path("run"))) is None


def test_several_labels_have_no_worst_images_and_no_confusion() -> None:
    evaluated = blocks_of(object, classes=CLASSES, evals=({"step": 1, "ap": 0.5},))
    assert [type(block) for block in evaluated] == [Table]
    assert len(blocks_of(object, classes=CLASSES, evals=({"step": 1, "top1": 0.5},))) == 3


def test_recall_precision_and_f1_are_scikit_learns() -> None:
    cells = [(true, read) for true, row in enumerate(CONFUSION) for read, n in enumerate(row) for _ in range(n)]
    true, read = np.array(cells).T
    precision, recall, f1, _ = precision_recall_fscore_support(true, read, zero_division=0.0)
    table = class_table(CLASSES, CONFUSION)
    assert [column.title for column in table.columns] == ["class", "images", "correct", "recall", "precision", "F1"]
    assert [row[0].text for row in table.rows] == ["cow", "dog", "cat"]  # the lowest recall first
    for row in table.rows:
        index = NAMES.index(row[0].text)
        values = [each.value or 0.0 for each in row[3:]]
        assert values == pytest.approx([recall[index], precision[index], f1[index]])
    assert table.rows[0][4].text == ""  # never predicted: there is no precision


def test_without_a_confusion_matrix_the_table_has_recall_only() -> None:
    assert [column.title for column in class_table(CLASSES).columns] == ["class", "images", "correct", "recall"]


def test_the_worst_images_come_first_with_a_caption() -> None:
    mistakes = tuple(SavedImage(RECORD, PICTURE) for _ in range(20))
    worst, pairs = blocks_of(Gallery, classes=CLASSES, confusion=CONFUSION, mistakes=mistakes)
    assert len(worst.pictures) == 12
    assert (worst.pictures[0].title, list(worst.pictures[0].details)) == (
        "dog read as cat",
        ["63 % confident", "loss 4.20"],
    )
    assert [(each.title, list(each.details)) for each in pairs.pictures] == [
        ("dog read as cat", ["4 images", "44.4 % of its class"])
    ]


def test_confused_pairs_are_listed_by_images() -> None:
    table = next(each for each in blocks_of(Table, classes=CLASSES, confusion=CONFUSION) if "pairs" in each.title)
    rows = [[cell.text for cell in row] for row in table.rows]
    assert rows == [["dog", "cat", "4", "44.4 %"], ["cat", "dog", "2", "22.2 %"], ["cow", "cat", "1", "100.0 %"]]


def test_the_reliability_diagram_shows_filled_bins_and_the_ece() -> None:
    bins = (
        CalibrationBin(0.0, 0.5, 0, 0, 0.0),
        CalibrationBin(0.5, 0.75, 4, 2, 0.6),
        CalibrationBin(0.75, 1.0, 6, 5, 0.9),
    )
    (row,) = blocks_of(ChartRow, classes=CLASSES, calibration=bins)
    (bars,) = blocks_of(BarChart, classes=CLASSES, calibration=bins)
    (diagram,) = row.charts
    assert list(diagram.lines[1].points) == [(60.0, 50.0), (90.0, pytest.approx(100 * 5 / 6))]
    assert diagram.note.startswith("ECE 0.0800, 3 bins; over-confident by 8.0 points")
    assert [(each.name, each.text) for each in bars.rows] == [("50 to 75 %", "50 % of 4"), ("75 to 100 %", "83 % of 6")]


def test_maps_stand_beside_their_image_and_say_for_which_class() -> None:
    saved = SavedImage(RECORD, PICTURE, {"predicted": PICTURE, "true": PICTURE})
    gallery = blocks_of(Gallery, mistakes=(saved, SavedImage(RECORD, PICTURE)))[0]
    assert gallery.pictures[0].overlays == [(PICTURE, "what speaks for cat"), (PICTURE, "what speaks for dog")]
    assert gallery.pictures[1].overlays == [] and "speak for" in gallery.note
    assert blocks_of(Gallery, mistakes=(SavedImage(RECORD, PICTURE),))[0].note == ""


def test_maps_take_the_room_that_images_leave() -> None:
    pictures = [Thumbnail("x" * 10, "", [], "", [("y" * 5, ""), ("y" * 5, "")])] * 3
    assert [bool(each.overlays) for each in limit_thumbnails(pictures, 45)] == [True, False, False]
    limited = limit_thumbnails(pictures, 25)
    assert [bool(each.address) for each in limited] == [True, True, False]
    assert not any(each.overlays for each in limited)
