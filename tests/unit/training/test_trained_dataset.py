"""`dataset.json` is written and read, with any class names."""

import json
from dataclasses import replace

import pytest

from paceline.data.sources.builtin import load_digits
from paceline.training.trained_dataset import TrainedDataset

DIGITS = TrainedDataset.from_source(load_digits().train)


@pytest.mark.parametrize("image_size", [None, (8, 6)])
def test_a_round_trip_through_json(image_size) -> None:
    info = replace(DIGITS.info, image_size=image_size, class_names=("a,b", "", "été", "caf\udce9"))
    for is_pixels in (True, False):
        dataset = TrainedDataset(info, is_pixels)
        assert TrainedDataset.from_dict(json.loads(json.dumps(dataset.to_dict()))) == dataset


def test_pixels_in_memory_differ_from_files() -> None:
    train = load_digits().train
    assert TrainedDataset.from_source(train).is_pixels
    assert TrainedDataset.from_source(train).info is train.info


def test_a_later_version_is_refused() -> None:
    with pytest.raises(ValueError, match="it has version 2, this paceline reads 1"):
        TrainedDataset.from_dict({**DIGITS.to_dict(), "schema_version": 2})


def test_images_per_class_are_recorded() -> None:
    values = DIGITS.to_dict()
    assert sum(values["class_counts"]) == values["num_images"] and len(values["class_counts"]) == 10
