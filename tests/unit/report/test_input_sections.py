"""What a model was fed: images with their classes, splits, classes and image sizes, from records of any form."""

from pathlib import Path

import pytest

from paceline.report.document import BarChart, Gallery, KeyValueList
from paceline.report.input_sections import input_section
from paceline.report.read_run import RunData, SavedImage

PICTURE = "data:image/png;base64,AAAA"
DATASET = {"class_names": ["cat", "dog"], "class_counts": [5, 70]}
SIZES = {
    "images": 64, "is_sample": True, "min": [10, 20], "median": [30, 40], "max": [90, 80],
    "shorter_side": {"edges": [10, 40, 41], "counts": [50, 14]},
}  # fmt: skip


def blocks_of(kind, **fields):
    section = input_section(RunData(Path("run"), **fields))
    assert section is not None
    return [block for block in section.blocks if isinstance(block, kind)]


def facts_of(**fields):
    (facts,) = blocks_of(KeyValueList, **fields)
    return {name: cell.text for name, cell in facts.rows}


def test_nothing_recorded_is_no_section() -> None:
    assert input_section(RunData(Path("run"))) is None


def test_mixed_images_name_the_share_of_each_class() -> None:
    records = [{"name": "a/b.png", "classes": classes} for classes in ([["cat", 0.7], ["dog", 0.3]], [["dog", 1.0]])]
    images = tuple(SavedImage(record, PICTURE) for record in records)
    inputs = {"augment_on": "device", "mixed": True}
    (gallery,) = blocks_of(Gallery, inputs=inputs, input_images=images)
    assert [each.title for each in gallery.pictures] == ["70 % cat + 30 % dog", "dog"]
    assert gallery.title == "2 training images of the first step"
    assert "after augmentation on the device, with MixUp or CutMix" in gallery.note


@pytest.mark.parametrize(
    ("classes", "title"),
    [
        ([["cat", 1.0], ["dog", 1.0]], "cat + dog"),
        ([["cat", 1.0], ["dog", 1.0], ["fox", 1.0], ["owl", 1.0]], "cat + dog + fox + ..."),
        ([["cat", 1.0], ["dog", 0.3]], "100 % cat + 30 % dog"),
        ([["cat", 0.7]], "70 % cat"),
        ([], "no label"),
        (None, "?"),
    ],
)
def test_images_with_several_labels_name_them(classes: list | None, title: str) -> None:
    images = (SavedImage({"name": "a.png", "classes": classes}, PICTURE),)
    (gallery,) = blocks_of(Gallery, inputs={"augment_on": "host"}, input_images=images)
    assert [each.title for each in gallery.pictures] == [title]


def test_splits_classes_and_sizes_are_facts() -> None:
    plan = {"train_images": 75, "val_images": 8, "image_size": 32, "channels": 3, "dropped_images": 11}
    assert facts_of(plan=plan, dataset=DATASET, inputs={"image_sizes": SIZES}) == {
        "training images": "75",
        "validation images": "8",
        "classes": "2, 5 to 70 training images each; imbalanced",
        "image sizes": "width 20 to 80 pixels (median 40), height 10 to 90 (median 30), of 64 images",
        "input of the model": "32 x 32 pixels, 3 channels",
        "left out per epoch": "11, which do not fill a batch",
    }


def test_histograms_of_classes_and_sizes() -> None:
    classes, sizes = blocks_of(BarChart, dataset=DATASET, inputs={"image_sizes": SIZES})
    assert [(row.name, row.text) for row in classes.rows] == [("cat", "5"), ("dog", "70")]
    assert [(row.name, row.text) for row in sizes.rows] == [("10 to 39", "50"), ("40", "14")]
    many = {"class_names": [str(number) for number in range(100)], "class_counts": [*range(100)]}
    (chart,) = blocks_of(BarChart, dataset=many)
    assert "8 largest" in chart.title and [row.text for row in chart.rows][:2] == ["99", "98"]
    assert len(chart.rows) == 16


def test_classes_of_equal_size_need_no_histogram() -> None:
    equal = {"class_names": ["cat", "dog"], "class_counts": [7, 7]}
    assert facts_of(dataset=equal) == {"classes": "2, 7 each"} and not blocks_of(BarChart, dataset=equal)


@pytest.mark.parametrize("damage", [None, 7, "x", [], [None], {"edges": 3}, {"edges": [1, 2], "counts": [None]}, -1])
def test_records_of_another_form_are_no_error(damage) -> None:
    record = SavedImage({"classes": damage, "name": damage}, "")
    for name in ("class_names", "class_counts"):
        input_section(RunData(Path("run"), dataset={**DATASET, name: damage}))
    for name in ("min", "images", "shorter_side"):
        inputs = {"image_sizes": {**SIZES, name: damage}, "augment_on": damage, "mixed": damage}
        input_section(RunData(Path("run"), inputs=inputs, input_images=(record,)))
    input_section(RunData(Path("run"), inputs={"image_sizes": damage}, plan={"train_images": damage}))
