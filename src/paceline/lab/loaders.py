"""Measure loaders on a data set: images/s, and what they take of the machine for it, each in a process of its own.

What is measured is a window of a loader's steady state, with the files in memory; or, cold, one pass from its very
start over files that the kernel has forgotten. Loaders take turns, so that what else the machine does falls on all of
them alike. What the machine could do at most is measured beside them (`lab.floors`).
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np

from paceline.core.dataset import Source
from paceline.core.errors import DataError, PacelineError
from paceline.core.limits import usable_cores
from paceline.core.process import die_with_parent
from paceline.data.loader import LoaderOptions, build_train_loader
from paceline.data.sampler import TrainOrder
from paceline.data.tally import LoaderName
from paceline.lab.tree import memory_bytes, taken
from paceline.measure.contention import RankCpu, build_cpu_timer, contention
from paceline.measure.timing import now_s
from paceline.recipe.schema.data import Data

Cache = Literal["warm", "cold"]
_ENDLESS: Final = 1 << 40
_LOOK_S: Final = 0.2
"""How often memory is looked at, which takes a few milliseconds of a core."""


@dataclass(frozen=True)
class Window:
    """How long is measured, and batches of what: `num_images` samples, each as often as there is time for."""

    seconds: float
    batch_size: int
    image_size: int
    num_images: int


@dataclass(frozen=True)
class Measured:
    """One measurement. `bytes_read` are what the source gave, `disk_bytes` what came from storage for that.

    `memory_bytes` is the most that was held beyond what the process had before, files' pages not counted. `lost_cpu` is
    the share of the time that it wanted to run in which other processes held the cores.
    """

    images: int
    wall_s: float
    cpu_s: float
    bytes_read: int
    disk_bytes: int
    memory_bytes: int = 0
    lost_cpu: float = 0.0


class Contender(Protocol):
    """Something that gives images."""

    @property
    def name(self) -> str:
        """What it is."""
        ...

    @property
    def cores(self) -> int:
        """How many threads or processes work."""
        ...

    def measure(self, window: Window, cache: Cache) -> Measured:
        """Measure it in this process, which is left to it."""
        ...


@dataclass(frozen=True)
class Loading:
    """A loader of a source, as a run would have it on a host: `reads` says what, such as `pack`."""

    loader: LoaderName
    reads: str
    source: Source
    data: Data
    workers: int

    @property
    def name(self) -> str:
        """The loader, and what it reads."""
        return f"{self.loader}, {self.reads}"

    @property
    def cores(self) -> int:
        """How many threads or processes work."""
        return max(1, self.workers)

    def measure(self, window: Window, cache: Cache) -> Measured:
        """Measure it in this process: from the start where the cache is cold, else in steady state."""
        order = TrainOrder(0, window.num_images, window.batch_size)
        options = LoaderOptions(self.workers, pin_memory=False, now=now_s, loader=self.loader)
        loader = build_train_loader(self.data, self.source, order, lambda step: window.image_size, options)
        batches = loader.batches(0, order.steps_per_epoch if cache == "cold" else _ENDLESS)
        try:
            images = (len(batch) for batch in batches)
            counted = count_images(images, window.seconds, 0 if cache == "cold" else 2 * self.workers + 3)
            stats = loader.stats()
            assert stats is not None, "it was built with a clock"
            read_bytes = round(stats.bytes_read / max(1, stats.images) * counted.images)
            return counted.measured(read_bytes, _disk_bytes())
        finally:
            batches.close()  # type: ignore[attr-defined]
            loader.close()


class Counted(NamedTuple):
    """Images, seconds and CPU seconds of a window, and the share of the time it wanted to run that others had."""

    images: int
    wall_s: float
    cpu_s: float
    lost_cpu: float

    def measured(self, bytes_read: int, disk_bytes: int) -> Measured:
        """Return it as a measurement."""
        return Measured(self.images, self.wall_s, self.cpu_s, bytes_read, disk_bytes, lost_cpu=self.lost_cpu)


def count_images(batches: Iterator[int], seconds: float, num_warmup: int) -> Counted:
    """Return what a window behind `num_warmup` batches came to, given the batches' sizes.

    The window ends with a batch, or where there are no more.
    """
    for _ in range(num_warmup):
        next(batches)
    cpu = build_cpu_timer()
    cpu.resume()
    images, cpu_s, began_s = 0, taken(os.getpid()).cpu_s, now_s()
    for size in batches:
        images += size
        if now_s() - began_s >= seconds:
            break
    wall_s, cpu_s, times = now_s() - began_s, taken(os.getpid()).cpu_s - cpu_s, cpu.read()
    found = None if times is None else contention([RankCpu(times, place=0, cores=usable_cores(), threads=1)])
    return Counted(images, wall_s, cpu_s, 0.0 if found is None else found.share)


def _disk_bytes() -> int:
    return taken(os.getpid()).disk_bytes


def measure_apart(contender: Contender, window: Window, cache: Cache) -> Measured:
    """Measure a contender in a forked process, whose memory is looked at from here. Raise `DataError` where it dies."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_measure_there, args=(contender, window, cache, theirs, os.getpid()))
    process.start()
    theirs.close()
    assert process.pid is not None
    first = most = memory_bytes(process.pid)
    try:
        while not ours.poll(_LOOK_S):
            most = max(most, memory_bytes(process.pid))
        found = ours.recv()
    except EOFError:
        process.join()
        raise DataError(
            f"{contender.name}: ended with exit code {process.exitcode} while it was measured (see above)"
        ) from None
    finally:
        process.kill()
        process.join()
        ours.close()
    if isinstance(found, PacelineError):
        raise found
    return Measured(**{**asdict(found), "memory_bytes": max(0, most - first)})


def _measure_there(contender: Contender, window: Window, cache: Cache, mouth: Connection, parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts the parent too, which ends this one
    try:
        found: Measured | PacelineError = contender.measure(window, cache)
    except PacelineError as error:
        found = error
    mouth.send(found)


@dataclass(frozen=True)
class Row:
    """What a contender came to over n turns: medians, and the lowest and highest rate.

    `images_per_s_per_core` is a thread's or process's share, `cpu_ms` the CPU time of an image, and bytes are an
    image's; `memory_bytes` and `lost_cpu` are the most of all turns. `kind` is loader or floor.
    """

    name: str
    kind: Literal["loader", "floor"]
    cache: Cache
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
        """Return it as plain values, for JSON."""
        return asdict(self)


def summarise(contender: Contender, cache: Cache, turns: Sequence[Measured]) -> Row:
    """Return what the turns of a contender came to."""
    rates = [turn.images / turn.wall_s for turn in turns]
    images = [max(1, turn.images) for turn in turns]

    def median(values: Iterable[float]) -> float:
        return float(np.median(list(values)))

    return Row(
        name=contender.name,
        kind="loader" if isinstance(contender, Loading) else "floor",
        cache=cache,
        cores=contender.cores,
        n=len(turns),
        images_per_s=median(rates),
        spread=(min(rates), max(rates)),
        images_per_s_per_core=median(rates) / contender.cores,
        cpu_ms=median(1000 * turn.cpu_s / number for turn, number in zip(turns, images, strict=True)),
        bytes_read=median(turn.bytes_read / number for turn, number in zip(turns, images, strict=True)),
        disk_bytes=median(turn.disk_bytes / number for turn, number in zip(turns, images, strict=True)),
        memory_bytes=max(turn.memory_bytes for turn in turns),
        lost_cpu=max(turn.lost_cpu for turn in turns),
    )


Turn = tuple[Contender, Cache]


def take_turns(
    turns: Sequence[Turn],
    rounds: int,
    window: Window,
    *,
    prepare: Callable[[Contender, Cache], None],
    told: Callable[[int, int, str], None],
) -> list[Row]:
    """Measure all of `turns` in each of `rounds`, the second time from the last to the first; return them in order.

    `prepare` is called before each, to have files in memory or not; `told` hears how many are done, of how many, and
    which one begins.
    """
    found: dict[int, list[Measured]] = {index: [] for index in range(len(turns))}
    total = rounds * len(turns)
    for number in range(rounds):
        for index in list(found)[:: -1 if number % 2 else 1]:
            contender, cache = turns[index]
            told(sum(map(len, found.values())), total, contender.name)
            prepare(contender, cache)
            found[index].append(measure_apart(contender, window, cache))
    return [summarise(*turns[index], measured) for index, measured in found.items()]
