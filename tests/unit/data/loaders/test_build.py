"""Batches are a function of the step, not of the worker or the first step. Unreadable samples are reported."""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.core.dataset import ArraySource, DatasetInfo, Sample
from paceline.core.errors import DataError, WatchError
from paceline.data.bad_images import BadImage
from paceline.data.batch import Batch
from paceline.data.loaders import process
from paceline.data.loaders.batch_maker import InlineLoader
from paceline.data.loaders.build import LoaderOptions, build_eval_loader, build_train_loader
from paceline.data.loaders.process import ProcessLoader
from paceline.data.order import EvalShard, TrainOrder
from paceline.data.workers import WorkerProgress, init_worker
from paceline.recipe.schema.data import Data

INFO = DatasetInfo("made", "train", 50, ("a", "b"), 3, (16, 16), (0.5,) * 3, (0.25,) * 3)
AUGMENT = Data(augment=("pad_crop", "flip", "rotate"))  # type: ignore[arg-type]
MIX = Data(augment=("pad_crop", {"name": "flip", "mode": "alternating"}, "mixup", "cutmix"))  # type: ignore[arg-type]
CROP = Data(augment=("random_resized_crop", "flip"))  # type: ignore[arg-type]


def source() -> ArraySource:
    images = np.random.default_rng(0).integers(0, 256, (50, 16, 16, 3), dtype=np.uint8)
    return ArraySource(INFO, images, np.arange(50, dtype=np.int64) % 2)


class BadSource:
    """A source with some unreadable samples; the others have their index in every pixel and as label."""

    info = replace(INFO, image_size=None)

    def __init__(self, *bad: int) -> None:
        self.bad = bad or (7,)

    def __len__(self) -> int:
        return 50

    def read(self, index: int) -> Sample:
        if index in self.bad:
            raise DataError(f"made/{index}.jpg: cannot be decoded (remove it)")
        return np.full((16, 16, 3), index, np.uint8), index

    def name_of(self, index: int) -> str:
        return f"made/{index}.jpg"


def batches(data: Data, first: int, stop: int, *, workers: int = 0, rank: int = 0, world: int = 1) -> Iterator[Batch]:
    order = TrainOrder(seed=1, num_images=50, batch_size=12, rank=rank, world_size=world)
    return build_train_loader(data, source(), order, always_16, LoaderOptions(workers, False)).batches(first, stop)


def always_16(step: int) -> int:
    return 16


def same(one: Batch, other: Batch) -> bool:
    return bool(
        torch.equal(one.images, other.images)
        and torch.equal(one.labels, other.labels)
        and np.array_equal(one.indices, other.indices)
        and torch.equal(one.draws, other.draws)
    )


@pytest.mark.parametrize("data", [AUGMENT, CROP, MIX], ids=["gathered", "one by one", "mixed"])
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_make_the_same_batches_as_the_rank_itself(data: Data, workers: int) -> None:
    inline, ahead = list(batches(data, 0, 9)), list(batches(data, 0, 9, workers=workers))
    assert len(inline) == len(ahead) == 9
    assert all(same(one, other) for one, other in zip(inline, ahead, strict=True))


@pytest.mark.parametrize("data", [AUGMENT, CROP, MIX], ids=["gathered", "one by one", "mixed"])
def test_starting_at_a_later_step_gives_the_same_batches(data: Data) -> None:
    whole, tail = list(batches(data, 0, 9)), list(batches(data, 5, 9))
    assert all(same(one, other) for one, other in zip(whole[5:], tail, strict=True))


@pytest.mark.parametrize("data", [AUGMENT, CROP, MIX], ids=["gathered", "one by one", "mixed"])
def test_ranks_together_make_the_batch_of_one_rank(data: Data) -> None:
    parts = [list(batches(data, 0, 9, rank=rank, world=3)) for rank in range(3)]
    for step, whole in enumerate(batches(data, 0, 9)):
        assert torch.equal(torch.cat([part[step].images for part in parts]), whole.images)
        assert torch.equal(torch.cat([part[step].draws for part in parts]), whole.draws)


def test_a_sample_is_augmented_anew_each_epoch() -> None:
    seen: dict[int, list[torch.Tensor]] = {}
    for batch in batches(AUGMENT, 0, 12):
        for index, image in zip(batch.indices.tolist(), batch.images, strict=True):
            seen.setdefault(index, []).append(image)
    repeated = [images for images in seen.values() if len(images) > 1]
    assert len(repeated) > 30
    assert sum(torch.equal(images[0], images[1]) for images in repeated) < len(repeated) / 10


def test_an_alternating_flip_shows_every_image_both_ways_in_two_epochs() -> None:
    data = Data(augment=({"name": "flip", "mode": "alternating"},))  # type: ignore[arg-type]
    seen: dict[int, list[torch.Tensor]] = {}
    for batch in batches(data, 0, 16):
        for index, image in zip(batch.indices.tolist(), batch.images, strict=True):
            seen.setdefault(index, []).append(image)
    whole = [images for images in seen.values() if len(images) == 4]  # an epoch leaves 2 of the 50 images out
    assert len(whole) > 40
    for first, second, third, fourth in whole:
        assert torch.equal(first, second.flip(2)) and not torch.equal(first, second)
        assert torch.equal(first, third) and torch.equal(second, fourth)


@pytest.mark.parametrize("data", [AUGMENT, CROP], ids=["gathered", "one by one"])
def test_the_size_of_a_batch_is_the_one_of_its_step(data: Data) -> None:
    order = TrainOrder(seed=1, num_images=50, batch_size=12)
    sizes = {0: 8, 1: 16, 2: 24}
    loader = build_train_loader(data, source(), order, sizes.__getitem__, LoaderOptions(0, False))
    assert [batch.images.shape[-2:] for batch in loader.batches(0, 3)] == [(8, 8), (16, 16), (24, 24)]


def test_evaluation_batches_are_the_images_as_they_are() -> None:
    loader = build_eval_loader(AUGMENT, source(), EvalShard(50, 16), 16, LoaderOptions(0, False))
    images = torch.cat([batch.images for batch in loader.batches(0, 4)])
    assert torch.equal(images, torch.from_numpy(source().images.transpose(0, 3, 1, 2).copy()))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_sample_raises_its_own_error_from_anywhere(workers: int) -> None:
    order = TrainOrder(seed=1, num_images=50, batch_size=25)
    loader = build_train_loader(Data(), BadSource(), order, always_16, LoaderOptions(workers, False))
    with pytest.raises(DataError, match=r"^made/7.jpg: cannot be decoded \(remove it\)$"):
        list(loader.batches(0, 2))


def test_workers_end_when_the_rank_stops_early() -> None:
    before = _children()
    ahead = batches(AUGMENT, 0, 1000, workers=2)
    next(ahead)
    children = _children() - before
    assert len(children) >= 2
    ahead.close()  # type: ignore[attr-defined]
    del ahead
    deadline = time.monotonic() + 20
    while _children() & children and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _children() & children


FORKING = str(Path(__file__).parents[3] / "forking.py")


def _children() -> set[int]:
    """Return the child processes, except the fork server of the tests."""
    psutil = pytest.importorskip("psutil")
    found = set()
    for child in psutil.Process(os.getpid()).children(recursive=True):
        try:
            serves = child.cmdline()[1:2] == [FORKING]
        except psutil.Error:  # it has just ended, and is not waited for yet
            serves = False
        if not serves:
            found.add(child.pid)
    return found


def test_a_batch_splits_into_equal_micro_batches_in_order() -> None:
    whole = next(iter(batches(MIX, 0, 1)))
    parts = whole.split(3)
    assert [len(part) for part in parts] == [4, 4, 4]
    assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
    assert torch.equal(torch.cat([part.draws for part in parts]), whole.draws)
    assert whole.draws.shape == (12, 4) and whole.draws.dtype == torch.float64
    assert np.concatenate([part.indices for part in parts]).tolist() == whole.indices.tolist()


def test_no_workers_means_no_processes() -> None:
    order = TrainOrder(seed=1, num_images=50, batch_size=12)
    inline, ahead = (
        build_train_loader(Data(), source(), order, always_16, LoaderOptions(workers, False)) for workers in (0, 1)
    )
    assert isinstance(inline, InlineLoader) and isinstance(ahead, ProcessLoader)


def test_workers_that_do_not_start_are_replaced(monkeypatch, tmp_path) -> None:
    """As after a fork that inherits a held lock of the interpreter: the first workers never run Python."""
    first = tmp_path / "first"

    def die_at_start(parent: int, progress: WorkerProgress, worker: int) -> None:
        if worker == 1 and not first.exists():
            first.touch()
            time.sleep(60)
        init_worker(parent, progress, worker)

    monkeypatch.setattr(process, "init_worker", die_at_start)
    monkeypatch.setattr(process, "START_TIMEOUT_S", 1.0)
    order = TrainOrder(seed=1, num_images=50, batch_size=10)
    before = _children()
    inline, parallel = (
        build_train_loader(Data(), source(), order, always_16, LoaderOptions(workers, False)) for workers in (0, 2)
    )
    for expected, batch in zip(inline.batches(0, 10), parallel.batches(0, 10), strict=True):
        assert torch.equal(batch.images, expected.images)
    assert first.exists() and _children() <= before


def test_workers_that_never_start_are_reported(monkeypatch) -> None:
    monkeypatch.setattr(process, "init_worker", lambda *args: time.sleep(60))
    monkeypatch.setattr(process, "START_TIMEOUT_S", 0.2)
    before = _children()
    with pytest.raises(WatchError, match=r"^data\.workers: 2 workers .* within 0\.2 s, 4 times .*data\.workers=0\)$"):
        next(batches(Data(), 0, 9, workers=2))
    assert _children() <= before


SKIP = Data(on_bad_image="skip")


def bad(*indices: int) -> tuple[BadImage, ...]:
    return tuple(
        BadImage(each, f"made/{each}.jpg", f"made/{each}.jpg: cannot be decoded (remove it)") for each in indices
    )


def skipping(
    *samples: int, data: Data = SKIP, workers: int = 0, rank: int = 0, world: int = 1, first: int = 0
) -> Iterator[Batch]:
    order = TrainOrder(seed=1, num_images=50, batch_size=10, rank=rank, world_size=world)
    loader = build_train_loader(data, BadSource(*samples), order, always_16, LoaderOptions(workers, False))
    return loader.batches(first, 10)


# matrix: 35
def test_the_next_readable_sample_replaces_a_bad_one_with_its_own_label() -> None:
    seen = {}
    for batch in skipping(7, 8, 49):
        assert torch.equal(batch.images[:, 0, 0, 0].long(), batch.labels)
        for index, label in zip(batch.indices.tolist(), batch.labels.tolist(), strict=True):
            seen[index] = label
    expected = {index: index for index in range(50)} | {7: 9, 8: 9, 49: 0}
    assert seen == expected


# matrix: 35
def test_bad_samples_are_listed_once_per_batch_in_order_of_occurrence() -> None:
    listed_by_batch = [batch.bad for batch in skipping(7, 8, 49)]
    asked = [[index for index in batch.indices.tolist() if index in (7, 8, 49)] for batch in skipping(7, 8, 49)]
    assert sum(map(len, asked)) == 6 and {each for row in asked for each in row} == {7, 8, 49}
    for listed, wanted in zip(listed_by_batch, asked, strict=True):
        walked = [walk for each in wanted for walk in ((7, 8) if each == 7 else (each,))]
        assert listed == bad(*dict.fromkeys(walked))


# matrix: 35
@pytest.mark.parametrize("workers", [1, 2])
def test_replacements_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    data = Data(on_bad_image="skip", augment=("random_resized_crop", "flip"))  # type: ignore[arg-type]
    inline, ahead = list(skipping(7, 8, data=data)), list(skipping(7, 8, data=data, workers=workers))
    assert len(inline) == 10 and any(batch.bad for batch in inline)
    assert all(same(one, other) and one.bad == other.bad for one, other in zip(inline, ahead, strict=True))


# matrix: 35
def test_replacements_depend_neither_on_the_world_size_nor_on_the_first_step() -> None:
    data = Data(on_bad_image="skip", augment=("random_resized_crop", "flip"))  # type: ignore[arg-type]
    whole = list(skipping(7, 8, 21, data=data))
    halves = [list(skipping(7, 8, 21, data=data, rank=rank, world=2)) for rank in range(2)]
    for step, batch in enumerate(whole):
        assert torch.equal(torch.cat([half[step].images for half in halves]), batch.images)
        assert torch.equal(torch.cat([half[step].labels for half in halves]), batch.labels)
        assert {*halves[0][step].bad, *halves[1][step].bad} == {*batch.bad}
    tail = list(skipping(7, 8, 21, data=data, first=4))
    assert len(tail) == 6
    assert all(same(one, other) and one.bad == other.bad for one, other in zip(whole[4:], tail, strict=True))


# matrix: 35
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_drops_bad_samples_and_lists_them(workers: int) -> None:
    samples = (0, 17, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 49)
    loader = build_eval_loader(SKIP, BadSource(*samples), EvalShard(50, 16), 16, LoaderOptions(workers, False))
    batches = list(loader.batches(0, 4))
    assert [len(batch) for batch in batches] == [15, 15, 0, 1]
    kept = [index for index in range(50) if index not in samples]
    assert [index for batch in batches for index in batch.indices.tolist()] == kept
    assert [label for batch in batches for label in batch.labels.tolist()] == kept
    assert tuple(each for batch in batches for each in batch.bad) == bad(*samples)
    empty = batches[2]
    assert empty.images.shape == (0, 3, 16, 16) and empty.images.dtype == torch.uint8
    assert empty.labels.shape == (0,) and empty.labels.dtype == torch.int64
    assert empty.draws.shape == (0, 0) and empty.draws.dtype == torch.float64
    assert empty.indices.shape == (0,) and empty.indices.dtype == np.int64


# matrix: 35
def test_more_bad_samples_in_a_batch_than_are_allowed_end_the_run() -> None:
    few = Data(on_bad_image="skip", max_bad_images=2)
    message = r"^data.on_bad_image: skip, but 3 images of a batch cannot be read, the last one made/\d+.jpg "
    with pytest.raises(DataError, match=message):
        list(skipping(*range(50), data=few))


# matrix: 35
def test_a_split_without_one_readable_image_ends_the_run() -> None:
    with pytest.raises(DataError, match=r"^data.on_bad_image: skip, but all 50 images cannot be read"):
        list(skipping(*range(50)))


def test_micro_batches_list_bad_samples_with_the_first() -> None:
    whole = next(batch for batch in skipping(7) if batch.bad)
    parts = whole.split(2)
    assert [part.bad for part in parts] == [bad(7), ()]
    assert [len(part) for part in parts] == [5, 5]


class Trap(BadSource):
    """A source whose sample 7 does something to the worker that reads it."""

    def __init__(self, spring: Callable[[], object]) -> None:
        super().__init__()
        self.spring = spring

    def read(self, index: int) -> Sample:
        if index == 7:
            self.spring()
        return np.zeros((16, 16, 3), np.uint8), 0


def sprung(spring: Callable[[], object], timeout: str = "5min") -> str:
    """Return the error about a worker that reads a trap, raised within ten seconds."""
    order = TrainOrder(seed=1, num_images=50, batch_size=10)
    data = Data(worker_timeout=timeout)  # type: ignore[arg-type]
    loader = build_train_loader(data, Trap(spring), order, always_16, LoaderOptions(2, False))
    batch = next(step for step in range(5) if 7 in order.indices(step))
    before = _children()
    started = time.monotonic()
    with pytest.raises(WatchError) as caught:
        for _ in loader.batches(0, 5):
            started = time.monotonic()
    assert time.monotonic() - started < 10
    assert _children() <= before
    message = str(caught.value)
    assert "\n" not in message and caught.value.exit_code == 1
    assert f"in the batch of step {batch + 1}, at sample 7, made/7.jpg (" in message
    return message


# matrix: 17
@pytest.mark.parametrize(
    ("spring", "end"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: ctypes.string_at(0), "was killed by SIGSEGV"),
        (lambda: os._exit(3), "ended with exit code 3"),
    ],
    ids=["killed", "crashed", "gone"],
)
def test_a_worker_that_dies_is_reported_with_its_sample(spring: Callable[[], object], end: str) -> None:
    assert f" {end} " in sprung(spring)


# matrix: 18
@pytest.mark.parametrize(
    "spring",
    [lambda: time.sleep(600), lambda: ctypes.PyDLL(None).sleep(600), lambda: os.kill(os.getpid(), signal.SIGSTOP)],
    ids=["sleeping", "holding the interpreter", "stopped"],
)
def test_a_worker_that_hangs_is_reported_with_its_sample(spring: Callable[[], object]) -> None:
    message = sprung(spring, "2s")
    assert message.startswith("data.worker_timeout: no batch for 2s: worker ") and " hangs " in message


def test_a_slow_trainer_is_not_a_hanging_worker() -> None:
    order = TrainOrder(seed=1, num_images=50, batch_size=10)
    data = Data(worker_timeout="1s")  # type: ignore[arg-type]
    loader = build_train_loader(data, BadSource(99), order, always_16, LoaderOptions(1, False))
    steps = 0
    for _ in loader.batches(0, 5):
        time.sleep(2.5 if steps == 0 else 0)
        steps += 1
    assert steps == 5


def test_a_worker_that_dies_between_two_batches_raises_at_the_next_request() -> None:
    before = _children()
    ahead = batches(CROP, 0, 1000, workers=2)
    next(ahead)
    os.kill(min(_children() - before), signal.SIGKILL)
    time.sleep(0.5)  # DataLoader's own handler would raise now, in the middle of a step
    with pytest.raises(WatchError, match="was killed by SIGKILL"):
        next(ahead)


def test_internal_errors_in_a_worker_keep_their_traceback() -> None:
    def bug() -> None:
        raise RuntimeError("a bug")

    order = TrainOrder(seed=1, num_images=50, batch_size=10)
    loader = build_train_loader(Data(), Trap(bug), order, always_16, LoaderOptions(1, False))
    with pytest.raises(RuntimeError, match=r"(?s)Caught RuntimeError in DataLoader worker.*a bug"):
        list(loader.batches(0, 5))
