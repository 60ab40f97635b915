"""`core.dataset`: facts of a split, and a split that is already pixels."""

import pickle

import numpy as np
import pytest

from paceline.core.dataset import ArraySource, DatasetInfo


@pytest.fixture
def info() -> DatasetInfo:
    return DatasetInfo("toy", "val", 3, ("cat", "dog"), 1, (4, 5), (0.5,), (0.25,))


@pytest.fixture
def source(info: DatasetInfo) -> ArraySource:
    images = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5, 1)
    return ArraySource(info, images, np.array([0, 1, 0], dtype=np.int64))


def test_classes_are_counted_by_their_names(info):
    assert info.num_classes == 2


def test_notes_are_empty_by_default(info):
    assert info.notes == ()


def test_an_array_source_reads_pixels_and_a_plain_label(source):
    pixels, label = source.read(1)
    assert np.array_equal(pixels, np.arange(20, 40, dtype=np.uint8).reshape(4, 5, 1))
    assert (label, type(label)) == (1, int)
    assert len(source) == 3


def test_an_array_source_names_its_samples_by_set_split_and_index(source):
    assert source.name_of(2) == "toy/val[2]"


def test_a_source_reads_the_same_in_another_process(source):
    other = pickle.loads(pickle.dumps(source))
    assert other.info == source.info
    assert all(np.array_equal(other.read(index)[0], source.read(index)[0]) for index in range(3))
    assert [other.read(index)[1] for index in range(3)] == [0, 1, 0]
