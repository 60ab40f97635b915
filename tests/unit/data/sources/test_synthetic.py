"""Synthetic images: learnable, and the same on every machine."""

import hashlib

import numpy as np
import pytest
from sklearn.linear_model import RidgeClassifier

from paceline.data.sources import builtin
from paceline.data.sources.builtin import load_synthetic
from paceline.recipe.schema.source import Synthetic


@pytest.mark.parametrize(("image_size", "channels", "num_classes"), [(8, 1, 2), (1, 3, 3), (33, 3, 10), (3, 1, 5)])
def test_shapes_follow_the_section_and_labels_are_balanced(image_size, channels, num_classes):
    section = Synthetic(
        num_images=61, num_val_images=7, num_classes=num_classes, image_size=image_size, channels=channels
    )
    data = load_synthetic(section)
    for source, num_images in ((data.train, 61), (data.val, 7)):
        assert source.images.shape == (num_images, image_size, image_size, channels)
        assert (source.images.dtype, source.labels.dtype) == (np.uint8, np.int64)
        frequency = np.bincount(source.labels, minlength=num_classes)
        assert frequency.max() - frequency.min() <= 1
        assert (source.info.num_images, source.info.num_classes) == (num_images, num_classes)
        assert (source.info.image_size, len(source.info.mean)) == ((image_size, image_size), channels)


def test_the_pixels_are_the_same_on_every_machine():
    data = load_synthetic(Synthetic(num_images=100, num_val_images=10, image_size=16))
    digest = hashlib.sha256(data.train.images.tobytes() + data.val.images.tobytes()).hexdigest()
    assert digest[:16] == "d2d2af1a054a3d5a"


def test_a_linear_model_learns_the_classes_on_images_it_has_not_seen():
    data = load_synthetic(Synthetic(num_images=600, num_val_images=200, image_size=16))
    model = RidgeClassifier().fit(data.train.images.reshape(600, -1) / 255, data.train.labels)
    assert model.score(data.val.images.reshape(200, -1) / 255, data.val.labels) > 0.95


def test_training_and_validation_images_differ():
    data = load_synthetic(Synthetic(num_images=50, num_val_images=50))
    assert not set(map(bytes, data.train.images)) & set(map(bytes, data.val.images))


def test_mean_and_deviation_are_near_those_stated():
    train = load_synthetic(Synthetic(num_images=500, num_val_images=1, num_classes=100)).train
    scaled = train.images / 255
    assert np.abs(scaled.mean((0, 1, 2)) - train.info.mean).max() < 0.02
    assert np.abs(scaled.std((0, 1, 2)) - train.info.std).max() < 0.02


def test_chunks_do_not_change_the_pixels(monkeypatch):
    section = Synthetic(num_images=40, num_val_images=2, image_size=5)
    whole = load_synthetic(section).train.images
    monkeypatch.setattr(builtin, "_CHUNK_BYTES", 64)
    assert np.array_equal(load_synthetic(section).train.images, whole)


def test_too_many_images_are_refused_with_the_number_that_fits(error_message):
    message = error_message(load_synthetic, Synthetic(num_images=1_281_167, num_val_images=500, image_size=224))
    assert message == (
        "data.source.num_images: 1281167 of 224x224 would take 179.7 GiB in each process "
        "(the limit is 4; at most 28032 fit)"
    )
