"""What a run was trained on is written down and read again, whatever its classes are called."""

import json
from dataclasses import replace

import pytest

from paceline.data.sources.builtin import load_digits
from paceline.training.trained_dataset import TrainedDataset

DIGITS = TrainedDataset.from_source(load_digits().train)


@pytest.mark.parametrize("image_size", [None, (8, 6)])
def test_facts_come_back_from_json_as_they_were(image_size) -> None:
    info = replace(DIGITS.info, image_size=image_size, class_names=("a,b", "", "été", "caf\udce9"))
    for is_pixels in (True, False):
        facts = TrainedDataset(info, is_pixels)
        assert TrainedDataset.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts


def test_pixels_in_memory_are_told_from_files() -> None:
    train = load_digits().train
    assert TrainedDataset.from_source(train).is_pixels
    assert TrainedDataset.from_source(train).info is train.info


def test_what_a_later_version_has_written_is_refused() -> None:
    with pytest.raises(ValueError, match="it has version 2, this paceline reads 1"):
        TrainedDataset.from_dict({**DIGITS.to_dict(), "schema_version": 2})
