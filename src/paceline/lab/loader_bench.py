"""Benchmark data loaders: images/s, CPU time, disk reads and memory, each loader in its own process.

Beside the loaders that fit are ceilings, such as decoding alone.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from paceline.core.dataset import ArraySource, Datasets, Source, has_one_size
from paceline.core.errors import DataError, PacelineError, RecipeError
from paceline.core.host import usable_cores
from paceline.core.process import PROC, cpu_ticks, descendants, die_with_parent, read_text_or_empty
from paceline.data.loaders.build import LoaderOptions, build_train_loader
from paceline.data.loaders.choose import choose_loader, has_jpegs
from paceline.data.loaders.native_plan import BatchPlan, BatchPlanner, LocatedRecords, PackImages
from paceline.data.native import NativeExtension, load_native
from paceline.data.order import TrainBatchSchedule, TrainOrder
from paceline.data.pack.reader import PackSource
from paceline.data.resize import build_train_resizer
from paceline.data.sources.subset import select_samples
from paceline.data.timing import LoaderName
from paceline.lab.dataset_stats import spread_indices
from paceline.lab.page_cache import list_source_files
from paceline.measure.cpu import RankCpu, build_cpu_timer, cpu_result
from paceline.measure.timer import now_s
from paceline.recipe.schema.augment import Flip, PadCrop
from paceline.recipe.schema.data import Data

if TYPE_CHECKING:
    from paceline.data._native import Task

CacheState = Literal["warm", "cold"]
DECODE_CEILING: Final = "ceiling: native decode"
_DECODE_STAGES: Final = {"ceiling: entropy decode": 1, "ceiling: to planes": 2, DECODE_CEILING: 0}
_UNBOUNDED_STEPS: Final = 1 << 40
_MEMORY_POLL_S: Final = 0.2
"""Interval of memory readings, each of which takes a few milliseconds of a core."""
_MAX_IN_FLIGHT: Final = 4
_COPIED_BYTES: Final = 256 << 20
"""More than any CPU cache holds, so that memory is copied."""
_MAX_BATCH: Final = 64
"""A window ends with a batch, and the slowest loader makes only a few of this size per second."""


def read_cpu_s(pid: int, proc: Path = PROC) -> float:
    """Return the CPU seconds of a process and its descendants so far; 0 without /proc."""
    # Workers count while they run, and the CPU time of ended ones is in their parent's.
    return sum(cpu_ticks(one, proc) for one in (pid, *descendants(pid, proc))) / os.sysconf("SC_CLK_TCK")


def read_disk_bytes(pid: int, proc: Path = PROC) -> int:
    """Return the bytes that a process and its descendants have read from storage."""
    return _sum_proc_fields(pid, "io", ("read_bytes",), proc)


def read_memory_bytes(pid: int, proc: Path = PROC) -> int:
    """Return the memory of a process and its descendants without file pages; shared memory counts once."""
    # PSS divides shared pages among their processes, so that a sum counts them once. File pages are the page cache's.
    return 1024 * _sum_proc_fields(pid, "smaps_rollup", ("Pss_Anon", "Pss_Shmem"), proc)


def _sum_proc_fields(pid: int, table: str, fields: Sequence[str], proc: Path) -> int:
    total = 0
    for one in (pid, *descendants(pid, proc)):
        for line in read_text_or_empty(proc / str(one) / table).splitlines():
            name, _, rest = line.partition(":")
            total += int(rest.split()[0]) if name in fields else 0
    return total


@dataclass(frozen=True)
class MeasurementWindow:
    """Seconds to measure, and the batches: `num_images` samples, repeated as often as needed."""

    seconds: float
    batch_size: int
    image_size: int
    num_images: int


@dataclass(frozen=True)
class LoaderMeasurement:
    """One measurement. `bytes_read` came from the source, `disk_bytes` from storage.

    `memory_bytes` is the peak above the process's initial memory, without the page cache. `lost_cpu` is the share of
    its runnable time in which other processes used the cores.
    """

    images: int
    wall_s: float
    cpu_s: float
    bytes_read: int = 0
    disk_bytes: int = 0
    memory_bytes: int = 0
    lost_cpu: float = 0.0


@dataclass(frozen=True)
class BenchCase:
    """Something that yields images, by `cores` working threads or processes."""

    name: str
    cores: int

    def measure(self, window: MeasurementWindow, cache: CacheState) -> LoaderMeasurement:
        """Measure it in this process."""
        raise NotImplementedError


@dataclass(frozen=True)
class LoaderCase(BenchCase):
    """A loader of a source, configured as in a run; `source_kind` is the kind of source, such as `pack`."""

    loader: LoaderName
    source_kind: str
    source: Source
    data: Data
    workers: int

    @classmethod
    def build(cls, loader: LoaderName, source_kind: str, source: Source, data: Data, workers: int) -> "LoaderCase":
        """Return the case, named after the loader and its kind of source."""
        return cls(f"{loader}, {source_kind}", max(1, workers), loader, source_kind, source, data, workers)

    def measure(self, window: MeasurementWindow, cache: CacheState) -> LoaderMeasurement:
        """Measure one pass from the start if the cache is cold, else a window of the steady state."""
        order = TrainOrder(0, window.num_images, window.batch_size)
        options = LoaderOptions(self.workers, pin_memory=False, clock=now_s, loader=self.loader)
        loader = build_train_loader(self.data, self.source, order, lambda step: window.image_size, options)
        batches = loader.batches(0, order.steps_per_epoch if cache == "cold" else _UNBOUNDED_STEPS)
        try:
            images = (len(batch) for batch in batches)
            measured = count_images(images, window.seconds, 0 if cache == "cold" else 2 * self.workers + 3)
            stats = loader.stats()
            assert stats is not None, "it was built with a clock"
            read_bytes = round(stats.bytes_read / max(1, stats.images) * measured.images)
            return replace(measured, bytes_read=read_bytes, disk_bytes=read_disk_bytes(os.getpid()))
        finally:
            batches.close()  # type: ignore[attr-defined]
            loader.close()


@dataclass(frozen=True)
class DecodeCeiling(BenchCase):
    """The native decoder on a pack, up to a stage, without collating batches."""

    stage: int
    source: PackSource
    data: Data
    core: NativeExtension

    def measure(self, window: MeasurementWindow, cache: CacheState) -> LoaderMeasurement:
        """Measure it in this process."""
        counted = count_images(self.iter_batch_sizes(window), window.seconds, 2 * _MAX_IN_FLIGHT)
        num_bytes = self.source.locate(np.arange(window.num_images, dtype=np.int64))[2].mean()
        return replace(counted, bytes_read=round(counted.images * num_bytes))

    def iter_batch_sizes(self, window: MeasurementWindow) -> Iterator[int]:
        """Yield the size of each batch when it is decoded, endlessly."""
        planned, pool = self._iter_planned(window), self.core.Pool(self.cores)
        pending: deque[tuple[Task, int]] = deque()
        shape = (window.batch_size, self.source.info.channels, window.image_size, window.image_size)
        # More outputs than tasks in flight, so that none is overwritten while it is decoded.
        outs = [np.zeros(shape, dtype=np.uint8) for _ in range(_MAX_IN_FLIGHT + 1)]
        for number, batch in enumerate(planned):
            out = outs[number % len(outs)]
            status = np.zeros(len(batch.indices), dtype=np.int32)
            located = batch.located
            assert isinstance(located, LocatedRecords), "those of a pack"
            task = pool.submit(
                *located[1:],
                batch.boxes,
                batch.flips,
                batch.is_inside,
                batch.size,
                out.shape[1],
                out,
                status,
                self.stage,
            )
            pending.append((task, len(batch.indices)))
            if len(pending) == _MAX_IN_FLIGHT:
                task, size = pending.popleft()
                while not task.wait(1.0):  # in slices, so that Ctrl-C is handled
                    pass
                yield size

    def _iter_planned(self, window: MeasurementWindow) -> Iterator[BatchPlan]:
        order = TrainOrder(0, window.num_images, window.batch_size)
        sizing = build_train_resizer(self.data, are_one_size=has_one_size(self.source))
        schedule = TrainBatchSchedule(
            order, lambda step: window.image_size, [False] * sizing.num_draws, 0, steps_per_draw=16
        )
        return BatchPlanner(PackImages(self.source), schedule, sizing, None).batches(0, _UNBOUNDED_STEPS)


@dataclass(frozen=True)
class CopyCeiling(BenchCase):
    """Copy pixels of finished images between buffers on one core, as the cheapest loader would."""

    pixel_bytes: int

    def measure(self, window: MeasurementWindow, cache: CacheState) -> LoaderMeasurement:
        """Measure it in this process."""
        counted = count_images(self._iter_batch_sizes(window), window.seconds, 2)
        return replace(counted, bytes_read=counted.images * self.pixel_bytes * window.image_size**2)

    def _iter_batch_sizes(self, window: MeasurementWindow) -> Iterator[int]:
        batch_bytes = window.batch_size * self.pixel_bytes * window.image_size**2
        batches = max(2, _COPIED_BYTES // batch_bytes)
        images = np.zeros((batches, batch_bytes), dtype=np.uint8)
        images[:] = 1  # map every page
        out = np.zeros(batch_bytes, dtype=np.uint8)
        while True:
            for batch in images:
                np.copyto(out, batch)
                yield window.batch_size


def count_images(batches: Iterator[int], seconds: float, num_warmup: int) -> LoaderMeasurement:
    """Measure a window of `seconds` after `num_warmup` batches, given the sizes of batches. It ends with a batch."""
    for _ in range(num_warmup):
        next(batches)
    cpu = build_cpu_timer()
    if cpu is not None:
        cpu.resume()
    images, cpu_s, start_s = 0, read_cpu_s(os.getpid()), now_s()
    for size in batches:
        images += size
        if now_s() - start_s >= seconds:
            break
    wall_s, cpu_s = now_s() - start_s, read_cpu_s(os.getpid()) - cpu_s
    lost = None if cpu is None else cpu_result([RankCpu(cpu.read(), place=0, cores=usable_cores(), threads=1)])
    return LoaderMeasurement(images, wall_s, cpu_s, lost_cpu=0.0 if lost is None else lost.share)


def measure_in_subprocess(case: BenchCase, window: MeasurementWindow, cache: CacheState) -> LoaderMeasurement:
    """Measure in a forked process, whose memory this one polls. Raise `DataError` if the process dies."""
    # Each case gets its own process, as memory that one has freed would hide what the next one needs.
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_run_subprocess, args=(case, window, cache, sender, os.getpid()))
    process.start()
    sender.close()  # else `poll` would never see the end of a child that died
    assert process.pid is not None
    initial = peak = read_memory_bytes(process.pid)
    try:
        while not receiver.poll(_MEMORY_POLL_S):
            peak = max(peak, read_memory_bytes(process.pid))
        reply: LoaderMeasurement | PacelineError = receiver.recv()
    except EOFError:
        process.join()
        raise DataError(
            f"{case.name}: exited with code {process.exitcode} during the measurement (see above)"
        ) from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(reply, PacelineError):
        raise reply
    return replace(reply, memory_bytes=max(0, peak - initial))


def _run_subprocess(
    case: BenchCase, window: MeasurementWindow, cache: CacheState, sender: Connection, parent: int
) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too, which kills this process
    try:
        reply: LoaderMeasurement | PacelineError = case.measure(window, cache)
    except PacelineError as error:
        reply = error
    sender.send(reply)


@dataclass(frozen=True)
class BenchRow:
    """Result of a case over n rounds: medians, and the lowest and highest rate.

    `images_per_s_per_core` is per thread or process, `cpu_ms` the CPU time per image; bytes are per image.
    `memory_bytes` and `lost_cpu` are maxima. `kind` is loader or floor.
    """

    name: str
    kind: Literal["loader", "floor"]
    cache: CacheState
    cores: int
    n: int
    images_per_s: float
    spread: tuple[float, float]
    images_per_s_per_core: float
    cpu_ms: float
    bytes_read: float
    disk_bytes: float
    memory_bytes: int
    lost_cpu: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def summarize_measurements(case: BenchCase, cache: CacheState, measurements: Sequence[LoaderMeasurement]) -> BenchRow:
    """Return the result of a case over its rounds."""
    rates = [each.images / each.wall_s for each in measurements]

    def median_per_image(name: str) -> float:
        return float(median(getattr(each, name) / max(1, each.images) for each in measurements))

    return BenchRow(
        name=case.name,
        kind="loader" if isinstance(case, LoaderCase) else "floor",
        cache=cache,
        cores=case.cores,
        n=len(measurements),
        images_per_s=median(rates),
        spread=(min(rates), max(rates)),
        images_per_s_per_core=median(rates) / case.cores,
        cpu_ms=1000 * median_per_image("cpu_s"),
        bytes_read=median_per_image("bytes_read"),
        disk_bytes=median_per_image("disk_bytes"),
        memory_bytes=max(each.memory_bytes for each in measurements),
        lost_cpu=max(each.lost_cpu for each in measurements),
    )


BenchEntry = tuple[BenchCase, CacheState]


def run_bench(
    entries: Sequence[BenchEntry],
    rounds: int,
    window: MeasurementWindow,
    *,
    prepare: Callable[[BenchCase, CacheState], None],
    progress: Callable[[int, int, str], None],
) -> list[BenchRow]:
    """Measure all of `entries` in each of `rounds`, every other round in reverse; return results in order.

    `prepare` is called before each measurement, to fill or empty the page cache. `progress` gets the number done, the
    total and the next name.
    """
    measurements: dict[int, list[LoaderMeasurement]] = {index: [] for index in range(len(entries))}
    total = rounds * len(entries)
    # Loaders take turns, so that other load affects them equally.
    for round_index in range(rounds):
        for index in list(measurements)[:: -1 if round_index % 2 else 1]:
            case, cache = entries[index]
            progress(sum(map(len, measurements.values())), total, case.name)
            prepare(case, cache)
            measurements[index].append(measure_in_subprocess(case, window, cache))
    return [summarize_measurements(*entries[index], measured) for index, measured in measurements.items()]


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
    if isinstance(first, ArraySource) and not is_recipe:
        data = data.model_copy(update={"augment": (PadCrop(), Flip())})
    num_images = min(num_images, *map(len, sources.values()))
    # One process loads, like one rank.
    batch_size = data.global_batch_size if data.rank_batch_size == "auto" else data.rank_batch_size
    batch_size = min(_MAX_BATCH, batch_size, num_images)
    window = MeasurementWindow(seconds, batch_size, _choose_image_size(data, first), num_images)
    cases: list[BenchCase] = []
    left_out: list[tuple[str, str]] = []
    for kind, source in sources.items():
        for loader in _list_compatible_loaders(source):
            case = LoaderCase.build(loader, kind, source, data, 0 if loader in ("inline", "device") else workers)
            if reason := _find_obstacle(case):
                left_out.append((case.name, reason))
            else:
                cases.append(case)
    core = load_native() if first.info.pixel_format.is_photo else None
    for source in sources.values():
        if core is not None and isinstance(source, PackSource):
            cases += [DecodeCeiling(name, workers, stage, source, data, core) for name, stage in _DECODE_STAGES.items()]
    cases.append(CopyCeiling("ceiling: memcpy", 1, first.info.pixel_format.batch_bytes))
    files = {kind: tuple(list_source_files(source)) for kind, source in sources.items()}
    return LoaderBenchPlan(window, tuple(cases), tuple(left_out), sources, files)


def _choose_image_size(data: Data, source: Source) -> int:
    if data.image_size != "auto":
        return data.image_size
    return source.info.image_size[0] if source.info.image_size else data.auto_image_size


def _list_compatible_loaders(source: Source) -> tuple[LoaderName, ...]:
    match source:
        case ArraySource():
            return "inline", "device"
        case PackSource():
            return "threads", "processes", "native"
    return ("inline", "threads", "processes", "native") if has_jpegs(source) else ("inline", "threads", "processes")


def _find_obstacle(case: LoaderCase) -> str:
    if case.loader == "inline":
        return ""
    try:
        data = case.data.model_copy(update={"loader": case.loader, "workers": case.workers or "auto"})
        choose_loader(data, case.source, device="cpu", cores=1, free_bytes=float("inf"))
    except RecipeError as error:
        return str(error)
    return ""
