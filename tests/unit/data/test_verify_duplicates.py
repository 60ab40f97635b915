"""Samples with equal content are found, whatever their type, and no others."""

import numpy as np
import pytest

from paceline.data.verify import DuplicatePair, Duplicates, SampleDigests


def copies(contents, labels, num_train):
    digests = SampleDigests(len(contents))
    for number, (content, label) in enumerate(zip(contents, labels, strict=True)):
        if content is not None:
            digests.add(number, content, label)
    return digests.find_duplicates(num_train)


@pytest.mark.parametrize("contents", [[], [b"a"], [b"a", b"b"], [b"a", None, None]])
def test_a_single_image_is_no_duplicate(contents):
    assert copies(contents, [0] * len(contents), 1) == Duplicates(0, 0, 0, 0, ())


def test_pixels_are_equal_if_shape_and_values_are():
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    turned = np.asfortranarray(pixels)
    found = copies([pixels, pixels.reshape(4, 2, 3), turned, pixels.tobytes()], [0, 0, 0, 0], 4)
    assert found == Duplicates(1, 2, 0, 0, (DuplicatePair(0, 2, False, False),))


def test_the_pair_that_is_shown_differs_in_class_or_else_in_split():
    found = copies([b"a"] * 4, [1, 1, 0, 1], 2)
    assert found == Duplicates(1, 4, 1, 1, (DuplicatePair(0, 2, True, True),))
    found = copies([b"a"] * 4, [1, 1, 1, 1], 2)
    assert found == Duplicates(1, 4, 1, 0, (DuplicatePair(0, 2, True, False),))
    found = copies([b"a"] * 3, [1, 1, 1], 0)
    assert found == Duplicates(1, 3, 0, 0, (DuplicatePair(0, 1, False, False),))


def test_five_of_each_kind_are_shown_and_all_are_counted():
    num = 40
    contents = [f"{number}".encode() for number in range(num)] * 3
    labels = [0] * num + [number % 2 for number in range(num)] + [0] * num
    found = copies(contents, labels, 2 * num)
    assert (found.images, found.samples, found.across_splits, found.in_two_classes) == (40, 120, 40, 20)
    shown = [(pair.first, pair.in_two_classes) for pair in found.examples]
    assert shown == [(n, True) for n in (1, 3, 5, 7, 9)] + [(n, False) for n in (0, 2, 4, 6, 8)]


def test_many_duplicates_are_grouped_as_by_a_dictionary():
    random = np.random.default_rng(0)
    drawn = random.integers(300, size=1000)
    labels = random.integers(3, size=1000).tolist()
    found = copies([f"{each}".encode() for each in drawn], labels, 700)
    groups = [np.flatnonzero(drawn == each).tolist() for each in range(300)]
    groups = [group for group in groups if len(group) > 1]
    assert found.images == len(groups) > 200
    assert found.samples == sum(map(len, groups))
    assert found.across_splits == sum(group[0] < 700 <= group[-1] for group in groups)
    assert found.in_two_classes == sum(len({labels[number] for number in group}) > 1 for group in groups)
