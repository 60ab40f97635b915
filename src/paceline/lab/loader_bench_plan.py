"""Plan a loader benchmark: the loaders that fit, and ceilings such as decoding alone."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.core.dataset import ArraySource, Datasets, Source
from paceline.core.errors import RecipeError
from paceline.data.loaders.choose import choose_loader
from paceline.data.loaders.native import BatchPlan, BatchPlanner
from paceline.data.native import DecodeTask, NativeExtension, load_native
from paceline.data.order import TrainBatchSchedule, TrainOrder
from paceline.data.pack.reader import PackSource
from paceline.data.resize import build_train_resizer
from paceline.data.timing import LoaderName
from paceline.lab.dataset_stats import select_samples, spread_indices
from paceline.lab.loader_bench import (
    BenchCase,
    BenchEntry,
    CacheState,
    LoaderCase,
    LoaderMeasurement,
    MeasurementWindow,
    count_images,
)
from paceline.lab.page_cache import list_source_files
from paceline.recipe.plan import DEFAULT_PHOTO_SIZE
from paceline.recipe.schema.augment import Flip, PadCrop
from paceline.recipe.schema.data import Data

DECODE_CEILING: Final = "ceiling: native decode"
DECODE_STAGES: Final = {"ceiling: entropy decode": 1, "ceiling: to planes": 2, DECODE_CEILING: 0}
_MAX_IN_FLIGHT: Final = 4
_COPIED_BYTES: Final = 256 << 20
"""More than any CPU cache holds, so that memory is copied."""
_MAX_BATCH: Final = 64
"""A window ends with a batch, and the slowest loader makes only a few of this size per second."""
_PIXEL_LOADERS: Final[tuple[LoaderName, ...]] = ("inline", "device")
_FILE_LOADERS: Final[tuple[LoaderName, ...]] = ("inline", "threads", "processes")
_PACK_LOADERS: Final[tuple[LoaderName, ...]] = ("threads", "processes", "native")


@dataclass(frozen=True)
class DecodeCeiling:
    """The native decoder on a pack, up to a stage, without collating batches."""

    name: str
    stage: int
    source: PackSource
    data: Data
    core: NativeExtension
    cores: int

    def measure(self, window: MeasurementWindow, cache: CacheState) -> LoaderMeasurement:
        """Measure it in this process."""
        counted = count_images(self.iter_batch_sizes(window), window.seconds, 2 * _MAX_IN_FLIGHT)
        num_bytes = self.source.locate(np.arange(window.num_images, dtype=np.int64))[2].mean()
        return counted.to_measurement(round(counted.images * num_bytes), 0)

    def iter_batch_sizes(self, window: MeasurementWindow) -> Iterator[int]:
        """Yield the size of each batch when it is decoded, endlessly."""
        planned, pool = self._iter_planned(window), self.core.Pool(self.cores)
        pending: deque[tuple[DecodeTask, int]] = deque()
        outs = [self._allocate_output(window) for _ in range(_MAX_IN_FLIGHT + 1)]
        # More outputs than tasks in flight, so that none is overwritten while it is decoded.
        for number, batch in enumerate(planned):
            out = outs[number % len(outs)]
            status = np.zeros(len(batch.indices), dtype=np.int32)
            arguments = (
                batch.shard_buffers,
                batch.shard_numbers,
                batch.offsets,
                batch.lengths,
                batch.boxes,
                batch.flips,
            )
            task = pool.submit(*arguments, batch.is_inside, batch.size, out.shape[1], out, status, self.stage)
            pending.append((task, len(batch.indices)))
            if len(pending) == _MAX_IN_FLIGHT:
                task, size = pending.popleft()
                while not task.wait(1.0):  # in slices, so that Ctrl-C is handled
                    pass
                yield size

    def _allocate_output(self, window: MeasurementWindow) -> NDArray[np.uint8]:
        side = window.image_size
        return np.zeros((window.batch_size, self.source.info.channels, side, side), dtype=np.uint8)

    def _iter_planned(self, window: MeasurementWindow) -> Iterator[BatchPlan]:
        order, sizing = TrainOrder(0, window.num_images, window.batch_size), build_train_resizer(self.data)
        schedule = TrainBatchSchedule(
            order, lambda step: window.image_size, [False] * sizing.num_draws, 0, lambda draws: draws, steps_per_draw=16
        )
        return BatchPlanner(self.source, schedule, sizing, None).batches(0, 1 << 40)


@dataclass(frozen=True)
class CopyCeiling:
    """Copy pixels of finished images between buffers on one core, as the cheapest loader would."""

    channels: int
    name: str = "ceiling: memcpy"
    cores: int = 1

    def measure(self, window: MeasurementWindow, cache: CacheState) -> LoaderMeasurement:
        """Measure it in this process."""
        counted = count_images(self._iter_batch_sizes(window), window.seconds, 2)
        return counted.to_measurement(counted.images * self.channels * window.image_size**2, 0)

    def _iter_batch_sizes(self, window: MeasurementWindow) -> Iterator[int]:
        batch_bytes = window.batch_size * self.channels * window.image_size**2
        batches = max(2, _COPIED_BYTES // batch_bytes)
        images = np.zeros((batches, batch_bytes), dtype=np.uint8)
        images[:] = 1  # map every page
        out = np.zeros(batch_bytes, dtype=np.uint8)
        while True:
            for batch in images:
                np.copyto(out, batch)
                yield window.batch_size


@dataclass(frozen=True)
class LoaderBenchPlan:
    """The cases of a benchmark; `left_out` are the names that cannot take part, with reasons.

    `files` and `sources` are, by kind of source, the files read and the splits.
    """

    window: MeasurementWindow
    cases: tuple[BenchCase, ...]
    left_out: tuple[tuple[str, str], ...]
    sources: dict[str, Source]
    files: dict[str, tuple[Path, ...]] = field(default_factory=dict)

    def list_entries(self, *, cold: bool) -> list[BenchEntry]:
        """Return the measurements of a round; `cold` adds those of file-reading loaders with a cold cache."""
        entries: list[BenchEntry] = [(case, "warm") for case in self.cases]
        if cold:
            entries += [
                (each, "cold") for each in self.cases if isinstance(each, LoaderCase) and self.files[each.source_kind]
            ]
        return entries


def sample_datasets(datasets: Datasets, num_images: int) -> Datasets:
    """Return at most `num_images` training images, evenly spread, and one validation image, which a pack needs."""
    train = select_samples(datasets.train, spread_indices(len(datasets.train), num_images))
    return Datasets(train, select_samples(datasets.val, spread_indices(len(datasets.val), 1)))


def build_bench_plan(
    data: Data, sources: dict[str, Source], *, num_images: int, seconds: float, workers: int, is_recipe: bool
) -> LoaderBenchPlan:
    """Return the benchmark of all loaders that can read one of `sources`, which hold the same images.

    Without a recipe (`is_recipe`) in-memory pixels are cropped and flipped.
    """
    first = next(iter(sources.values()))
    data = _with_default_augment(data, first, is_recipe=is_recipe)
    num_images = min(num_images, *map(len, sources.values()))
    # One process loads, like one rank.
    batch_size = data.global_batch_size if data.rank_batch_size == "auto" else data.rank_batch_size
    batch_size = min(_MAX_BATCH, batch_size, num_images)
    window = MeasurementWindow(seconds, batch_size, _choose_image_size(data, first), num_images)
    cases: list[BenchCase] = []
    left_out: list[tuple[str, str]] = []
    for reads, source in sources.items():
        for loader in _list_compatible_loaders(source):
            case = LoaderCase(loader, reads, source, data, 0 if loader in ("inline", "device") else workers)
            reason = _find_obstacle(case)
            if reason:
                left_out.append((case.name, reason))
            else:
                cases.append(case)
    cases += [floor for source in sources.values() for floor in _iter_decode_ceilings(source, data, workers)]
    cases.append(CopyCeiling(first.info.channels))
    files = {reads: tuple(list_source_files(source)) for reads, source in sources.items()}
    return LoaderBenchPlan(window, tuple(cases), tuple(left_out), sources, files)


def _with_default_augment(data: Data, source: Source, *, is_recipe: bool) -> Data:
    if is_recipe or not isinstance(source, ArraySource):
        return data
    return data.model_copy(update={"augment": (PadCrop(), Flip())})


def _choose_image_size(data: Data, source: Source) -> int:
    if data.image_size != "auto":
        return data.image_size
    return source.info.image_size[0] if source.info.image_size else DEFAULT_PHOTO_SIZE


def _list_compatible_loaders(source: Source) -> tuple[LoaderName, ...]:
    match source:
        case ArraySource():
            return _PIXEL_LOADERS
        case PackSource():
            return _PACK_LOADERS
    return _FILE_LOADERS


def _find_obstacle(loading: LoaderCase) -> str:
    settings = {"loader": loading.loader, "workers": loading.workers or "auto"}
    if loading.loader == "inline":
        return ""
    try:
        data = loading.data.model_copy(update=settings)
        choose_loader(data, loading.source, device="cpu", cores=1, free_bytes=float("inf"))
    except RecipeError as error:
        return str(error)
    return ""


def _iter_decode_ceilings(source: Source, data: Data, workers: int) -> Iterator[DecodeCeiling]:
    core = load_native()
    if core is None or not isinstance(source, PackSource):
        return
    for name, stage in DECODE_STAGES.items():
        yield DecodeCeiling(name, stage, source, data, core, workers)
