"""Loader statistics: exact numbers by a simulated clock, and bounds for real workers."""

import time
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from paceline.core.dataset import ArraySource, DatasetInfo, Sample, Source
from paceline.core.errors import DataError
from paceline.core.results import LoaderResult
from paceline.data.loaders.build import Loader, LoaderOptions, build_eval_loader, build_train_loader
from paceline.data.loaders.process import ProcessLoader
from paceline.data.order import EvalShard, TrainOrder
from paceline.data.workers import WorkerProgress
from paceline.recipe.schema.data import Data

INFO = DatasetInfo("made", "train", 50, ("a", "b"), 3, (16, 16), (0.5,) * 3, (0.25,) * 3)
ORDER = TrainOrder(seed=1, num_images=50, batch_size=10)
AUGMENT = Data(augment=("pad_crop", "flip"))  # type: ignore[arg-type]
PIXELS = 3 * 16 * 16


def arrays() -> ArraySource:
    images = np.random.default_rng(0).integers(0, 256, (50, 16, 16, 3), dtype=np.uint8)
    return ArraySource(INFO, images, np.arange(50, dtype=np.int64) % 2)


class Files:
    """PNG files of several lengths; before each is read, `before` is called with its index."""

    info = replace(INFO, image_size=None)

    def __init__(self, before: Callable[[int], object] = lambda index: None) -> None:
        self.before = before
        self.files = [self._encoded(index) for index in range(50)]

    def _encoded(self, index: int) -> bytes:
        with BytesIO() as file:
            Image.fromarray(np.full((16 + index, 20, 3), index, np.uint8)).save(file, "png")
            return file.getvalue()

    def __len__(self) -> int:
        return 50

    def read(self, index: int) -> Sample:
        self.before(index)
        return self.files[index], index % 2

    def name_of(self, index: int) -> str:
        return f"made/{index}.png"


class Ticking:
    """A clock that advances by a second per reading."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        self.s += 1
        return self.s


def timed(
    source: Source, now: Callable[[], float] | None, *, workers: int = 0, data: Data = AUGMENT, size: int = 16
) -> Loader:
    options = LoaderOptions(workers, pin_memory=False, clock=now)
    return build_train_loader(data, source, ORDER, lambda step: size, options)


def stats_of(loader: Loader) -> LoaderResult:
    stats = loader.stats()
    assert stats is not None
    return stats


@pytest.mark.parametrize(("size", "decode_s"), [(16, 0.0), (8, 3.0)], ids=["as they are", "resized"])
def test_a_batch_of_arrays_reads_the_clock_a_few_times(size: int, decode_s: float) -> None:
    turning = Data(augment=("rotate",))  # type: ignore[arg-type]  # which is a pass of its own everywhere
    loader = timed(arrays(), Ticking(), data=turning, size=size)
    assert len(list(loader.batches(0, 3))) == 3
    assert loader.stats() == LoaderResult(
        loader="inline",
        workers=0,
        batches=3,
        images=30,
        read_s=3.0,
        decode_s=decode_s,
        augment_s=6.0,
        collate_s=9.0,
        wait_s=24.0 + decode_s,  # the parts, and a look at the beginning and at the end
        queue_depth=0.0,
        ready=0.0,
        bytes_read=30 * PIXELS,
        bytes_made=30 * 3 * size * size,
        busy=None,
    )


def test_a_file_reads_the_clock_twice() -> None:
    loader = timed(Files(), Ticking())
    list(loader.batches(0, 3))
    stats = stats_of(loader)
    assert (stats.read_s, stats.decode_s, stats.augment_s, stats.collate_s) == (30.0, 30.0, 6.0, 9.0)


def test_slow_reads_count_as_reading_and_as_waiting() -> None:
    passed = [0.0]
    loader = timed(Files(lambda index: passed.append(passed[-1] + 2.0)), lambda: passed[-1])
    list(loader.batches(0, 4))
    stats = stats_of(loader)
    assert (stats.read_s, stats.wait_s) == (80.0, 80.0)
    assert stats.decode_s == stats.augment_s == stats.collate_s == 0.0


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_clock_there_is_no_result(workers: int) -> None:
    loader = timed(arrays(), None, workers=workers)
    assert len(list(loader.batches(0, 3))) == 3
    assert loader.stats() is None


@pytest.mark.parametrize("workers", [0, 2])
def test_the_result_counts_the_batches_delivered_by_any_iterator(workers: int) -> None:
    loader = timed(arrays(), time.perf_counter, workers=workers)
    first = loader.batches(0, 50)
    next(first), next(first)
    assert (stats_of(loader).batches, stats_of(loader).images) == (2, 20)
    first.close()  # type: ignore[attr-defined]
    list(loader.batches(7, 10))
    stats = stats_of(loader)
    assert (stats.workers, stats.batches, stats.images) == (workers, 5, 50)
    assert stats.bytes_read == stats.bytes_made == 50 * PIXELS
    assert stats.queue_depth <= 2 * workers


@pytest.mark.parametrize("workers", [0, 2])
def test_bytes_are_those_of_the_files_read_and_the_pixels_made(workers: int) -> None:
    source = Files()
    loader = timed(source, time.perf_counter, workers=workers, size=8)
    read = [index for batch in loader.batches(0, 3) for index in batch.indices.tolist()]
    stats = stats_of(loader)
    assert stats.bytes_read == sum(len(source.files[index]) for index in read)
    assert stats.bytes_made == 30 * 3 * 8 * 8


@pytest.mark.parametrize("workers", [0, 2])
def test_stages_fit_into_the_time_of_the_workers(workers: int) -> None:
    started_s = time.perf_counter()
    loader = timed(Files(), time.perf_counter, workers=workers)
    list(loader.batches(0, 10))
    elapsed_s = time.perf_counter() - started_s
    stats = stats_of(loader)
    parts = (stats.read_s, stats.decode_s, stats.augment_s, stats.collate_s)
    assert all(part > 0 for part in parts)
    assert 0 < sum(parts) <= max(1, workers) * elapsed_s
    assert 0 < stats.wait_s <= elapsed_s
    assert 0 <= stats.ready <= 1 and 0 <= stats.queue_depth <= 2 * workers
    if workers:
        assert stats.busy is not None and 0 < stats.busy <= 1
    else:
        assert stats.busy is None and stats.wait_s >= sum(parts)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_source_shows_in_reading(workers: int) -> None:
    loader = timed(Files(lambda index: time.sleep(0.002)), time.perf_counter, workers=workers)
    list(loader.batches(0, 3))
    stats = stats_of(loader)
    assert stats.read_s >= 30 * 0.002
    assert stats.wait_s >= 10 * 0.002  # the first batch is waited for from its first sample


def test_the_queue_depth_is_the_number_of_ready_batches() -> None:
    loader = timed(arrays(), time.perf_counter, workers=2)
    assert isinstance(loader, ProcessLoader)
    for handed, _ in enumerate(loader.batches(0, 8), start=1):
        _wait_for(loader.progress, min(8, handed + 4))
    # Two workers make two batches ahead each. How many there are at the first request is chance.
    expected = [min(8, number + 4) - number for number in range(1, 8)]
    stats = stats_of(loader)
    assert sum(expected) <= 8 * stats.queue_depth <= sum(expected) + 4
    assert stats.ready >= 7 / 8


def _wait_for(progress: WorkerProgress, num_made: int) -> None:
    deadline = time.monotonic() + 20
    while progress.num_made < num_made:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_fails_is_not_counted(workers: int) -> None:
    def fails(index: int) -> None:
        if index == ORDER.indices(2)[0]:
            raise DataError("made: cannot be read (mend it)")

    loader = timed(Files(fails), time.perf_counter, workers=workers)
    with pytest.raises(DataError):
        list(loader.batches(0, 5))
    assert stats_of(loader).batches == 2


def test_evaluation_is_timed_as_well() -> None:
    options = LoaderOptions(0, pin_memory=False, clock=Ticking())
    loader = build_eval_loader(Data(), arrays(), EvalShard(50, 16), 16, options)
    list(loader.batches(0, 4))
    stats = stats_of(loader)
    assert (stats.batches, stats.images, stats.read_s, stats.collate_s, stats.wait_s) == (4, 50, 4.0, 12.0, 32.0)
