"""Benchmark data loaders: images/s, CPU time, disk reads and memory, each loader in its own process."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np

from paceline.core.dataset import Source
from paceline.core.errors import DataError, PacelineError
from paceline.core.host import usable_cores
from paceline.core.process import PROC, cpu_ticks, descendants, die_with_parent, read_text_or_empty
from paceline.data.loaders.build import LoaderOptions, build_train_loader
from paceline.data.order import TrainOrder
from paceline.data.timing import LoaderName
from paceline.measure.cpu import RankCpu, build_cpu_timer, cpu_result
from paceline.measure.timer import now_s
from paceline.recipe.schema.data import Data

CacheState = Literal["warm", "cold"]
_UNBOUNDED_STEPS: Final = 1 << 40
_MEMORY_POLL_S: Final = 0.2
"""Interval of memory readings, each of which takes a few milliseconds of a core."""


class ResourceUsage(NamedTuple):
    """CPU seconds, and bytes read from storage, since the processes started."""

    cpu_s: float = 0.0
    disk_bytes: int = 0

    def subtract(self, before: "ResourceUsage") -> "ResourceUsage":
        """Return the usage since `before`."""
        return ResourceUsage(self.cpu_s - before.cpu_s, self.disk_bytes - before.disk_bytes)


def read_usage(pid: int, proc: Path = PROC) -> ResourceUsage:
    """Return the usage of a process and its descendants so far; 0 without /proc."""
    # Workers count while they run, and the CPU time of ended ones is in their parent's.
    pids = [pid, *descendants(pid, proc)]
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    return ResourceUsage(
        sum(cpu_ticks(one, proc) for one in pids) * tick_s, sum(_read_disk_bytes(one, proc) for one in pids)
    )


def read_memory_bytes(pid: int, proc: Path = PROC) -> int:
    """Return the memory of a process and its descendants without file pages; shared memory counts once."""
    return sum(_read_private_bytes(one, proc) for one in (pid, *descendants(pid, proc)))


def _read_disk_bytes(pid: int, proc: Path) -> int:
    return sum(number for name, number in _parse_proc_table(proc / str(pid) / "io") if name == "read_bytes")


def _read_private_bytes(pid: int, proc: Path) -> int:
    # PSS divides shared pages among their processes, so that a sum counts them once. File pages are the page cache's.
    fields = ("Pss_Anon", "Pss_Shmem")
    return 1024 * sum(number for name, number in _parse_proc_table(proc / str(pid) / "smaps_rollup") if name in fields)


def _parse_proc_table(path: Path) -> Iterator[tuple[str, int]]:
    for line in read_text_or_empty(path).splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        if number and number[0].isdecimal():
            yield name, int(number[0])


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
    bytes_read: int
    disk_bytes: int
    memory_bytes: int = 0
    lost_cpu: float = 0.0


class BenchCase(Protocol):
    """Something that yields images."""

    @property
    def name(self) -> str:
        """Label."""
        ...

    @property
    def cores(self) -> int:
        """Number of working threads or processes."""
        ...

    def measure(self, window: MeasurementWindow, cache: CacheState) -> LoaderMeasurement:
        """Measure it in this process."""
        ...


@dataclass(frozen=True)
class LoaderCase:
    """A loader of a source, configured as in a run; `source_kind` is the kind of source, such as `pack`."""

    loader: LoaderName
    source_kind: str
    source: Source
    data: Data
    workers: int

    @property
    def name(self) -> str:
        """Label: the loader and its kind of source."""
        return f"{self.loader}, {self.source_kind}"

    @property
    def cores(self) -> int:
        """Number of working threads or processes."""
        return max(1, self.workers)

    def measure(self, window: MeasurementWindow, cache: CacheState) -> LoaderMeasurement:
        """Measure one pass from the start if the cache is cold, else a window of the steady state."""
        # Warm: a window of the steady state, with files in memory. Cold: one pass from the start over files outside of
        # the page cache.
        order = TrainOrder(0, window.num_images, window.batch_size)
        options = LoaderOptions(self.workers, pin_memory=False, clock=now_s, loader=self.loader)
        loader = build_train_loader(self.data, self.source, order, lambda step: window.image_size, options)
        batches = loader.batches(0, order.steps_per_epoch if cache == "cold" else _UNBOUNDED_STEPS)
        try:
            images = (len(batch) for batch in batches)
            counts = count_images(images, window.seconds, 0 if cache == "cold" else 2 * self.workers + 3)
            stats = loader.stats()
            assert stats is not None, "it was built with a clock"
            read_bytes = round(stats.bytes_read / max(1, stats.images) * counts.images)
            return counts.to_measurement(read_bytes, _count_disk_bytes())
        finally:
            batches.close()  # type: ignore[attr-defined]
            loader.close()


class WindowCounts(NamedTuple):
    """Images, seconds, CPU seconds and lost CPU share of a window."""

    images: int
    wall_s: float
    cpu_s: float
    lost_cpu: float

    def to_measurement(self, bytes_read: int, disk_bytes: int) -> LoaderMeasurement:
        """Return it as a measurement."""
        return LoaderMeasurement(self.images, self.wall_s, self.cpu_s, bytes_read, disk_bytes, lost_cpu=self.lost_cpu)


def count_images(batches: Iterator[int], seconds: float, num_warmup: int) -> WindowCounts:
    """Measure a window of `seconds` after `num_warmup` batches, given the sizes of batches. It ends with a batch."""
    for _ in range(num_warmup):
        next(batches)
    cpu = build_cpu_timer()
    cpu.resume()
    images, cpu_s, start_s = 0, read_usage(os.getpid()).cpu_s, now_s()
    for size in batches:
        images += size
        if now_s() - start_s >= seconds:
            break
    wall_s, cpu_s, times = now_s() - start_s, read_usage(os.getpid()).cpu_s - cpu_s, cpu.read()
    lost = None if times is None else cpu_result([RankCpu(times, place=0, cores=usable_cores(), threads=1)])
    return WindowCounts(images, wall_s, cpu_s, 0.0 if lost is None else lost.share)


def _count_disk_bytes() -> int:
    return read_usage(os.getpid()).disk_bytes


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
        reply = receiver.recv()
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
    return LoaderMeasurement(**{**asdict(reply), "memory_bytes": max(0, peak - initial)})


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
    images = [max(1, each.images) for each in measurements]

    def median(values: Iterable[float]) -> float:
        return float(np.median(list(values)))

    return BenchRow(
        name=case.name,
        kind="loader" if isinstance(case, LoaderCase) else "floor",
        cache=cache,
        cores=case.cores,
        n=len(measurements),
        images_per_s=median(rates),
        spread=(min(rates), max(rates)),
        images_per_s_per_core=median(rates) / case.cores,
        cpu_ms=median(1000 * each.cpu_s / number for each, number in zip(measurements, images, strict=True)),
        bytes_read=median(each.bytes_read / number for each, number in zip(measurements, images, strict=True)),
        disk_bytes=median(each.disk_bytes / number for each, number in zip(measurements, images, strict=True)),
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
