"""The validation samples are a fraction of each class, chosen by name and seed only."""

import hashlib

import numpy as np
import pytest

from paceline.data.sources.image_files import select_validation


def chosen(sizes, fraction=0.2, seed=0):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    names = [f"{label}/{place}".encode() for place, label in enumerate(labels)]
    return labels, names, select_validation(labels, names, fraction=fraction, seed=seed)


def test_each_class_gives_its_fraction():
    labels, _, mask = chosen([10, 5, 100, 7])
    assert np.bincount(labels[mask]).tolist() == [2, 1, 20, 1]


@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
def test_a_class_of_two_has_one_sample_in_each_split(fraction):
    labels, _, mask = chosen([2, 3, 2], fraction)
    num_val, num_train = np.bincount(labels[mask], minlength=3), np.bincount(labels[~mask], minlength=3)
    assert num_val.min() >= 1
    assert num_train.min() >= 1


def test_a_class_of_one_stays_in_training():
    assert not chosen([1, 1, 1])[2].any()
    labels, _, mask = chosen([1, 4])
    assert labels[mask].tolist() == [1]


def test_the_choice_does_not_depend_on_the_order_of_the_samples():
    labels, names, mask = chosen([30, 40, 50])
    order = np.random.default_rng(0).permutation(len(labels))
    again = select_validation(labels[order], [names[place] for place in order], fraction=0.2, seed=0)
    assert np.array_equal(again, mask[order])


def test_the_choice_does_not_depend_on_other_classes():
    labels, names, mask = chosen([30, 40])
    alone = select_validation(labels[:30], names[:30], fraction=0.2, seed=0)
    assert np.array_equal(alone, mask[:30])


def test_seeds_of_any_size_give_different_choices():
    masks = [chosen([100], seed=seed)[2] for seed in (0, 1, 10**100)]
    assert len({mask.tobytes() for mask in masks}) == 3


def test_the_choice_is_the_same_on_every_machine():
    mask = chosen([20, 20, 20])[2]
    assert hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()[:16] == "59ac77eb5ea4e79a"
