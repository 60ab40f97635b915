"""Bad images: each is shared with all ranks, listed once and saved in the state; too many end the run."""

import pytest

from paceline.core.dataset import Datasets
from paceline.core.errors import DataError
from paceline.data.bad_images import BadImage
from paceline.data.sources.builtin import load_digits
from paceline.training.coordinator import BadImageRegistry

DATASETS: Datasets = load_digits()


def bad(*indices: int) -> list[BadImage]:
    return [BadImage(index, f"photo {index}", "is empty") for index in indices]


def images(known: list[int], listed: list, limit: int = 3, others: tuple[int, ...] = ()) -> BadImageRegistry:
    return BadImageRegistry(DATASETS, limit, lambda numbers: sorted({*numbers, *others}), listed.append, known)


def test_each_is_listed_once_and_kept_in_the_state() -> None:
    known, listed = [], []
    found = images(known, listed)
    assert found.add("train", bad(4, 4, 7)) == 2
    found.sync()
    assert found.add("train", bad(7)) == 0 and found.add("val", bad(7)) == 1
    found.sync()
    assert known == [8, 14, 15]
    assert [(row["split"], row["index"]) for row in listed] == [("train", 4), ("train", 7), ("val", 7)]
    assert listed[0] == {"split": "train", "index": 4, "path": "digits/train[4]", "reason": "is empty"}


def test_bad_images_of_another_rank_are_listed_too() -> None:
    known, listed = [], []
    found = images(known, listed, others=(10,))
    assert found.add("train", bad(4)) == 1
    found.sync()
    assert known == [8, 10] and listed[1]["reason"] == "another rank could not read it"


def test_known_bad_images_are_not_listed_again() -> None:
    known, listed = [8], []
    assert images(known, listed).add("train", bad(4)) == 0
    assert not listed


def test_more_than_the_limit_end_the_run() -> None:
    found = images([], [], limit=2).for_split("train")
    assert found.add(bad(1, 2)) == 2
    found.sync()
    assert found.add(bad(3)) == 1
    with pytest.raises(DataError, match=r"data.max_bad_images: 3 images .* more than 2, such as digits/train\[3\]"):
        found.sync()
