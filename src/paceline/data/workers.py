"""Workers that make batches: what each is at, and an error that names it when one dies or hangs. Torch-free.

Starting them and handing out the work is not done here.
"""

import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np

from paceline.core.dataset import ArraySource, DatasetInfo, Sample, Source
from paceline.core.errors import WatchError
from paceline.core.process import die_with_parent
from paceline.core.units import Duration

POLL_S = 1.0
"""How long a wait for a batch lasts before the workers are looked at."""
_LOOK_S = 0.005
_LEFT_TO_THE_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_HINTS = {
    signal.SIGKILL: "the kernel does that when memory runs out: lower data.workers",
    signal.SIGBUS: "shared memory may be full: see df /dev/shm",
}


class Spot(NamedTuple):
    """What a worker is at: its process, the number of a batch and the index of a sample; -1: none yet."""

    pid: int
    batch: int
    sample: int


class Trail:
    """Where each of `workers` workers is, in memory that they share with the process that forks them.

    A worker writes its own row, and nobody waits for it: what is read may be a sample behind. Beside the rows stands
    how many batches each has made.
    """

    def __init__(self, workers: int) -> None:
        shared = np.frombuffer(mmap.mmap(-1, workers * 4 * 8), dtype=np.int64).reshape(workers, 4)
        self._rows, self._made = shared[:, :3], shared[:, 3]
        self._row = 0
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._rows[:] = -1
        self._made[:] = 0

    def begin(self, worker: int, batch: int) -> None:
        """Note what worker number `worker`, which is not started yet, will begin with."""
        self._rows[worker] = -1, batch, -1

    def enter(self, worker: int, batch: int = -1) -> None:
        """Note that this process is worker number `worker` from now on, and what it begins with."""
        self._row = worker
        self._rows[worker] = os.getpid(), batch, -1

    def of(self, worker: int) -> "Trail":
        """Return the same trail, as worker number `worker` writes it where workers are threads of one process."""
        own = copy(self)
        own._row = worker
        return own

    def batch(self, number: int) -> None:
        """Note that this worker begins batch `number`."""
        self._rows[self._row, 1:] = number, -1

    def sample(self, index: int) -> None:
        """Note that this worker reads sample `index`."""
        self._rows[self._row, 2] = index

    def made(self) -> None:
        """Note that this worker has made a batch."""
        self._made[self._row] += 1

    @property
    def num_made(self) -> int:
        """How many batches all workers have made."""
        return int(self._made.sum())

    def spots(self) -> list[Spot]:
        """Return where every worker is."""
        return [Spot(*row) for row in self._rows.tolist()]

    def who_is_at(self, batch: int) -> tuple[int, Spot] | None:
        """Return the worker that is at a batch, and where in it, or None."""
        return next((found for found in enumerate(self.spots()) if found[1].batch == batch), None)


@dataclass(frozen=True)
class TracedSource:
    """Read `source`, and note in `trail` what is being read."""

    source: Source
    trail: Trail

    @property
    def info(self) -> DatasetInfo:
        """The facts of this split."""
        return self.source.info

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> Sample:
        """Return what `source` does. The note stays, as decoding comes after reading."""
        self.trail.sample(index)
        return self.source.read(index)

    def name_of(self, index: int) -> str:
        """Return what `source` calls the sample."""
        return self.source.name_of(index)


def traced(source: Source, trail: Trail) -> Source:
    """Return a source that notes what is read; pixels in memory, which neither hang nor crash, as they are."""
    return source if isinstance(source, ArraySource) else TracedSource(source, trail)


def enter_crew(parent: int, trail: Trail, worker: int) -> None:
    """Tie this worker to the rank that forked it: it ends with it, and leaves signals meant for the run to it."""
    trail.enter(worker)
    sys.excepthook = _hold_ones_peace
    for ignored in _LEFT_TO_THE_RANK:
        signal.signal(ignored, signal.SIG_IGN)
    die_with_parent(parent)


def has_entered(workers: Sequence[BaseProcess], trail: Trail, within_s: float) -> bool:
    """Wait until each of `workers` has entered its crew, or has died; return False where one does neither in time."""
    pause = threading.Event()
    for _ in range(round(within_s / _LOOK_S)):
        if _is_settled(workers, trail):
            return True
        pause.wait(_LOOK_S)
    return False


def _is_settled(workers: Sequence[BaseProcess], trail: Trail) -> bool:
    begun = sum(spot.pid >= 0 for spot in trail.spots())
    return begun >= len(workers) or any(worker.exitcode is not None for worker in workers)


def _hold_ones_peace(*_: object) -> None:
    """Print nothing: what a worker raises goes to its rank, and without a rank there is nobody to tell."""


@contextmanager
def own_child_signals() -> Iterator[None]:
    """Take back the handler of SIGCHLD that starting a DataLoader installs.

    It would raise in the midst of whatever the rank is doing when a worker dies, and name no sample.
    """
    before = signal.getsignal(signal.SIGCHLD)
    yield
    if threading.current_thread() is threading.main_thread() and before is not None:
        signal.signal(signal.SIGCHLD, before)


class Crew:
    """The workers of a loader, watched by a thread of their rank. Use it as a context; at its end so do they.

    `title` and `name_of` say what a user would call batch and sample numbers.
    """

    def __init__(
        self,
        processes: Sequence[BaseProcess],
        trail: Trail,
        timeout: Duration,
        title: Callable[[int], str],
        name_of: Callable[[int], str],
    ) -> None:
        self._processes = processes
        self._trail = trail
        self._timeout = timeout
        self._title = title
        self._name_of = name_of
        self._awaited = -1
        self._verdict = ""
        self._left = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="loader watch", daemon=True)

    def __enter__(self) -> "Crew":
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End what is left of the workers."""
        self._left.set()
        self._watcher.join()
        self._kill()
        for process in self._processes:
            process.join()

    def wait_for(self, number: int, ahead: Iterator[Any]) -> Any:
        """Return the next of `ahead`, a DataLoader's iterator with a timeout of `POLL_S`: batch `number`.

        Raise `WatchError` when a worker is dead, or when there is no batch for as long as the timeout says.
        """
        self._awaited = number
        while True:
            self._check()
            try:
                item = next(ahead)
                self._awaited = -1
                return item
            except (RuntimeError, OSError, EOFError) as error:
                failure = error
            if not str(failure).startswith("DataLoader timed out"):
                self._let_die()
                self._check()
                raise failure

    def _watch(self) -> None:
        """Kill the workers when one batch is waited for too long: the rank may be waiting in the midst of a message.

        A worker that is stopped while it hands over the memory of a batch would hold the rank up for ever.
        """
        before, polls = -1, 0
        while not self._left.wait(POLL_S):
            polls = polls + 1 if self._awaited == before >= 0 else 0
            before = self._awaited
            if polls * POLL_S >= self._timeout.seconds:
                dead = self._dead  # it may have died in the midst of a message
                self._verdict = self._death(dead) if dead else self._hang()
                self._kill()
                return

    def _let_die(self) -> None:
        """Wait until a worker that is on its way out, whose sockets are closed already, counts as dead."""
        ending = wait([process.sentinel for process in self._processes], timeout=POLL_S)
        for process in self._processes:
            if process.sentinel in ending:
                process.join()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    @property
    def _dead(self) -> BaseProcess | None:
        """A worker that has ended, or None."""
        return next((process for process in self._processes if process.exitcode is not None), None)

    def _check(self) -> None:
        """Raise what is to be said of a worker that hangs or is dead; no other is left to wait for."""
        dead = self._dead
        verdict = self._verdict or (self._death(dead) if dead else "")
        if verdict:
            self._kill()
            raise WatchError(verdict)

    def _death(self, process: BaseProcess) -> str:
        worker, spot = next(
            ((worker, spot) for worker, spot in enumerate(self._trail.spots()) if spot.pid == process.pid),
            (-1, Spot(-1, -1, -1)),
        )
        code = process.exitcode or 0
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = _HINTS.get(signal.Signals(-code), "") if code < 0 else ""
        fix = f"{hint}; else " if hint else ""
        return (
            f"data.workers: worker {worker} (pid {process.pid}) {end} {self._place(spot)} ({fix}look at that image, "
            f"or train with data.workers=0 to see what happens)"
        )

    def _hang(self) -> str:
        # Batches go round the workers, so the one that all others wait for is the one least far on.
        worker, spot = min(enumerate(self._trail.spots()), key=lambda item: item[1].batch)
        return (
            f"data.worker_timeout: no batch for {self._timeout}: worker {worker} (pid {spot.pid}) hangs "
            f"{self._place(spot)} (look at that image and its disk, or raise data.worker_timeout)"
        )

    def _place(self, spot: Spot) -> str:
        if spot.batch < 0:
            return "before its first batch"
        at = f", at sample {spot.sample}, {self._name_of(spot.sample)}" if spot.sample >= 0 else ""
        return f"in {self._title(spot.batch)}{at}"
