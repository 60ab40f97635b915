"""Every image of a dataset is checked once, and reported if it fails in any way."""

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from paceline.core.dataset import DatasetInfo, Datasets, TargetTable
from paceline.core.errors import DataError
from paceline.core.units import Duration
from paceline.data.bad_images import ImageError
from paceline.data.verify import DuplicatePair, Duplicates, verify_images

INFO = DatasetInfo("made", "train", 0, ("a",), 3, None, (0.5,) * 3, (0.25,) * 3)
SOON = Duration(2, "s")


@dataclass(frozen=True)
class Made:
    """`num` images; some of them do something when they are read."""

    name: str
    num: int
    acts: dict = field(default_factory=dict)
    samples: dict = field(default_factory=dict)
    info: DatasetInfo = INFO

    def __len__(self):
        return self.num

    def read(self, index):
        self.acts.get(index, int)()
        return self.samples.get(index, (b"P6 1 1 255\n" + f"{self.name}{index:07}".encode(), 0))

    def name_of(self, index):
        return f"{self.name}/{index}.ppm"


def refuse():
    raise ImageError("it", "is bad", "mend it")


def crash():
    faulthandler.disable()  # pytest's, which would print a long traceback
    ctypes.string_at(0)


def found(train, val, workers=2, timeout=SOON):
    """Return the bad images; check that the counts rise to all images, and no process is left."""
    progress = list(verify_images(Datasets(train, val), workers, timeout))
    counts = [each.images for each in progress]
    assert counts == sorted(counts) and counts[-1] == len(train) + len(val)
    assert not multiprocessing.active_children()
    return [(file.split, file.image.index, file.image.name, file.image.reason) for file in progress[-1].bad]


# matrix: 35
@pytest.mark.parametrize("workers", [1, 2, 3, 50])
def test_bad_images_of_both_splits_are_listed_in_order(workers):
    train, val = Made("t", 100, {0: refuse, 64: refuse, 99: refuse}), Made("v", 7, {6: refuse})
    assert found(train, val, workers) == [
        ("train", 0, "t/0.ppm", "is bad"),
        ("train", 64, "t/64.ppm", "is bad"),
        ("train", 99, "t/99.ppm", "is bad"),
        ("val", 6, "v/6.ppm", "is bad"),
    ]


def test_good_images_are_not_listed():
    assert found(Made("t", 100), Made("v", 3)) == []


def test_any_data_error_is_a_reason():
    def other():
        raise DataError("t/5.ppm: is gone (find it)")

    assert found(Made("t", 10, {5: other}), Made("v", 3)) == [("train", 5, "t/5.ppm", "t/5.ppm: is gone (find it)")]


@pytest.mark.parametrize("workers", [1, 3])
def test_duplicates_are_found_across_workers_splits_and_classes(workers):
    a, b, c = (b"P6 1 1 255\n" + color for color in (b"aaa", b"bbb", b"ccc"))
    train = Made("t", 100, {9: refuse}, {4: (a, 0), 71: (a, 0), 8: (b, 0), 99: (b, 1), 9: (c, 0), 10: (c, 0)})
    val = Made("v", 7, {}, {2: (a, 0), 6: (b, 1)})
    last = list(verify_images(Datasets(train, val), workers, SOON))[-1]
    assert last.duplicates == Duplicates(
        images=2,
        samples=6,
        across_splits=2,
        in_two_classes=1,
        examples=(DuplicatePair(8, 99, in_both_splits=True, in_two_classes=True), DuplicatePair(4, 102, True, False)),
    )


def test_targets_of_two_splits_are_compared_by_their_values():
    """A source of several labels numbers the targets of each split by themselves."""
    one, other, third = np.eye(3, dtype=np.float32)
    content = {0: (b"P6 1 1 255\naaa", 0), 1: (b"P6 1 1 255\nbbb", 1)}

    def split(name, *targets):
        info = replace(INFO, class_names=("a", "b", "c"), targets=TargetTable(np.stack(targets)))
        return Made(name, 2, {}, content, info)

    def duplicates(val):
        return list(verify_images(Datasets(split("t", one, other), val), 1, SOON))[-1].duplicates

    found = duplicates(split("v", one, third))
    assert found == Duplicates(2, 4, 2, 1, (DuplicatePair(1, 3, True, True), DuplicatePair(0, 2, True, False)))
    assert duplicates(split("v", other, one)).in_two_classes == 2


# matrix: 17
@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "kills the process that decodes it, by SIGKILL"),
        (crash, "kills the process that decodes it, by SIGSEGV"),
        (lambda: os._exit(3), "ends the process that decodes it, with exit code 3"),
    ],
    ids=["killed", "crashed", "gone"],
)
def test_an_image_that_kills_its_worker_is_bad_and_the_rest_are_checked(act, reason):
    train = Made("t", 200, {3: refuse, 37: refuse, 41: act, 101: act, 199: act})
    assert [(index, why) for _, index, _, why in found(train, Made("v", 5))] == [
        (3, "is bad"),
        (37, "is bad"),
        (41, reason),
        (101, reason),
        (199, reason),
    ]


# matrix: 18
@pytest.mark.parametrize(
    "act", [lambda: time.sleep(600), lambda: os.kill(os.getpid(), signal.SIGSTOP)], ids=["sleeping", "stopped"]
)
def test_an_image_that_hangs_its_worker_is_bad_and_the_rest_are_checked(act):
    train = Made("t", 50, {10: act, 33: refuse})
    assert [(index, why) for _, index, _, why in found(train, Made("v", 5))] == [
        (10, "is not decoded within 2s"),
        (33, "is bad"),
    ]


def test_a_worker_that_is_slow_but_goes_on_is_not_ended():
    """A report comes after 32 images, and these take longer than the timeout together."""
    train = Made("t", 28, dict.fromkeys(range(28), lambda: time.sleep(0.1)) | {20: refuse})
    assert found(train, Made("v", 0), workers=1, timeout=Duration(1, "s")) == [("train", 20, "t/20.ppm", "is bad")]


def test_closing_early_ends_all_processes():
    progress = verify_images(Datasets(Made("t", 10_000), Made("v", 5)), 2, SOON)
    next(progress)
    assert multiprocessing.active_children()
    progress.close()
    assert not multiprocessing.active_children()
