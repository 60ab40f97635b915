"""The digits that come with scikit-learn."""

import numpy as np
from sklearn import datasets

from paceline.data.sources.builtin import _read_digits, load_digits


def test_a_fifth_of_each_class_is_for_validation():
    digits = load_digits()
    train, val = digits.train, digits.val
    assert (len(train), len(val)) == (1438, 359)
    share = np.bincount(val.labels) / (np.bincount(val.labels) + np.bincount(train.labels))
    assert np.abs(share - 0.2).max() < 0.005
    together = np.concatenate([train.images, val.images]).reshape(1797, -1)
    whole = np.round(datasets.load_digits().data * 255 / 16).astype(np.uint8)
    assert sorted(map(bytes, together)) == sorted(map(bytes, whole))


def test_pixels_are_8x8_grey_over_the_whole_range():
    train = load_digits().train
    assert (train.images.dtype, train.images.shape[1:]) == (np.uint8, (8, 8, 1))
    assert (train.images.min(), train.images.max()) == (0, 255)
    assert train.labels.dtype == np.int64
    assert (train.info.image_size, train.info.channels, train.info.num_classes) == ((8, 8), 1, 10)
    assert train.info.num_images == len(train)


def test_the_stated_mean_and_deviation_are_those_of_the_training_split():
    train = load_digits().train
    scaled = train.images / 255
    assert abs(scaled.mean() - train.info.mean[0]) < 5e-5
    assert abs(scaled.std() - train.info.std[0]) < 5e-5


def test_the_split_is_the_same_each_time():
    first, second = load_digits(), load_digits()
    assert np.array_equal(first.val.images, second.val.images)
    assert not np.array_equal(first.val.labels, np.sort(first.val.labels))


def test_the_images_are_those_of_scikit_learn_with_and_without_its_file(monkeypatch):
    theirs, ours = datasets.load_digits(), _read_digits()
    monkeypatch.setattr("paceline.data.sources.builtin.find_spec", lambda name: None)
    for pixels, labels in (ours, _read_digits()):
        assert np.array_equal(pixels, theirs.images)
        assert np.array_equal(labels, theirs.target)
        assert (pixels.dtype, labels.dtype) == (np.float64, np.int64)
