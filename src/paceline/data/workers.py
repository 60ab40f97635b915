"""Worker processes: check what they need, track them, and name the sample if one dies or hangs. Torch-free."""

import mmap
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.core.dataset import ArraySource, DatasetInfo, Sample, Source
from paceline.core.errors import WatchError, WorldError
from paceline.core.pixels import PixelFormat
from paceline.core.process import die_with_parent
from paceline.core.units import Duration, count

# Seconds that one wait for a batch lasts before the workers are checked.
POLL_S = 1.0
_START_POLL_S = 0.005
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_HINT_BY_SIGNAL = {
    signal.SIGKILL: "the kernel does that when it runs out of memory: lower data.workers",
    signal.SIGBUS: "shared memory may be full: see df /dev/shm",
}

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps it
_OPEN_FILES_FOLDER = Path("/proc/self/fd")
# Tensors of a batch; each one in flight is an open file of the main process.
_TENSORS_PER_BATCH = 3
# Files per worker: ends of its queue, its sentinel, and the sockets that hand over a batch.
_FILES_PER_WORKER = 6
# Loaders with workers: training, validation, `train.eval_train`, and the losses of `data.sampler=hard`.
_MAX_LOADERS = 4
# Files that a rank opens later: checkpoints, logs, and images that it reads.
_SPARE_FILES = 64
_PAGE_BYTES = 4096


class WorkerPosition(NamedTuple):
    """Process id, batch number and sample index of a worker; -1 before the first."""

    pid: int
    batch: int
    sample: int


class WorkerProgress:
    """Positions of `workers` workers, in memory shared with the process that forks them."""

    # Each worker writes its own row without locking, so a reader may be one sample behind.
    def __init__(self, workers: int) -> None:
        # Columns: process id, batch, sample, and the number of batches made.
        shared = np.frombuffer(mmap.mmap(-1, workers * 4 * 8), dtype=np.int64).reshape(workers, 4)
        self._rows, self._made = shared[:, :3], shared[:, 3]
        self._row = 0
        self.clear()

    def clear(self) -> None:
        """Reset all rows."""
        self._rows[:] = -1
        self._made[:] = 0

    def clear_positions(self) -> None:
        """Reset all rows but the process ids, while the workers are idle."""
        self._rows[:, 1:] = -1
        self._made[:] = 0

    def set_start(self, worker: int, batch: int) -> None:
        """Set the first batch of worker number `worker` before it starts."""
        self._rows[worker] = -1, batch, -1

    def register(self, worker: int, batch: int = -1) -> None:
        """Register this process as worker number `worker`, at its first batch."""
        self._row = worker
        self._rows[worker] = os.getpid(), batch, -1

    def for_worker(self, worker: int) -> "WorkerProgress":
        """Return a view that writes the row of worker number `worker`, which is a thread."""
        view = copy(self)
        view._row = worker
        return view

    def set_batch(self, number: int) -> None:
        """Record that this worker starts batch `number`."""
        self._rows[self._row, 1:] = number, -1

    def set_sample(self, index: int) -> None:
        """Record that this worker reads sample `index`."""
        self._rows[self._row, 2] = index

    def count_batch(self) -> None:
        """Count a batch that this worker has made."""
        self._made[self._row] += 1

    @property
    def num_made(self) -> int:
        """Number of batches that all workers have made."""
        return int(self._made.sum())

    def positions(self) -> list[WorkerPosition]:
        """Return the position of every worker."""
        return [WorkerPosition(*row) for row in self._rows.tolist()]

    def find_worker(self, batch: int) -> tuple[int, WorkerPosition] | None:
        """Return the number and position of the worker at `batch`, or None."""
        return next((entry for entry in enumerate(self.positions()) if entry[1].batch == batch), None)


@dataclass(frozen=True)
class TrackedSource:
    """Read from `source`, and record each sample in `progress`."""

    source: Source
    progress: WorkerProgress

    @property
    def info(self) -> DatasetInfo:
        """Same as in `source`."""
        return self.source.info

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> Sample:
        """Record and read a sample."""
        self.progress.set_sample(index)  # stays while the sample is decoded, which may crash too
        return self.source.read(index)

    def name_of(self, index: int) -> str:
        """Return the sample's name."""
        return self.source.name_of(index)


def track_source(source: Source, progress: WorkerProgress) -> Source:
    """Wrap a source to record its reads; return an `ArraySource` unchanged."""
    # Pixels in memory cannot hang or crash a worker.
    return source if isinstance(source, ArraySource) else TrackedSource(source, progress)


def init_worker(parent: int, progress: WorkerProgress, worker: int) -> None:
    """Initialize a worker process: exit with its parent, and ignore signals meant for the run."""
    progress.register(worker)
    sys.excepthook = _suppress_traceback
    for ignored in _IGNORED_SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    die_with_parent(parent)


def wait_for_workers(workers: Sequence[BaseProcess], progress: WorkerProgress, timeout_s: float) -> bool:
    """Wait until every worker has registered or one has died; return False after `timeout_s` seconds."""
    pause = threading.Event()
    for _ in range(round(timeout_s / _START_POLL_S)):
        if _have_started_or_died(workers, progress):
            return True
        pause.wait(_START_POLL_S)
    return False


def _have_started_or_died(workers: Sequence[BaseProcess], progress: WorkerProgress) -> bool:
    started = sum(position.pid >= 0 for position in progress.positions())
    return started >= len(workers) or any(worker.exitcode is not None for worker in workers)


def _suppress_traceback(*_: object) -> None:
    """Do nothing: errors are forwarded to the rank."""


@contextmanager
def preserve_sigchld_handler() -> Iterator[None]:
    """Restore the SIGCHLD handler that starting a DataLoader replaces."""
    # DataLoader's handler would raise in arbitrary code of the rank when a worker dies, without naming a sample.
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGCHLD, before)


class WorkerSupervisor:
    """Watch the workers of a loader in a thread until the context exits, and kill them if one dies or hangs."""

    def __init__(
        self,
        processes: Sequence[BaseProcess],
        progress: WorkerProgress,
        timeout: Duration,
        describe_batch: Callable[[int], str],  # of a batch number
        name_of: Callable[[int], str],  # of a sample index
    ) -> None:
        self._processes = processes
        self._progress = progress
        self._timeout = timeout
        self._describe_batch = describe_batch
        self._name_of = name_of
        self._awaited = -1
        self._failure = ""
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="loader watch", daemon=True)

    def __enter__(self) -> "WorkerSupervisor":
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._watcher.join(2 * POLL_S)  # not for ever: at interpreter exit, this thread no longer runs

    def wait_for(self, number: int, batches: Iterator[Any]) -> Any:
        """Return batch `number`: the next item of `batches`, a DataLoader iterator with a timeout of `POLL_S`.

        Raise `WatchError` if a worker is dead, or no batch arrives within the timeout.
        """
        self._awaited = number
        while True:
            self._raise_if_failed()
            try:
                item = next(batches)
                self._awaited = -1
                return item
            except (RuntimeError, OSError, EOFError) as error:  # a timeout, or the closed socket of a dead worker
                failure = error
            if not str(failure).startswith("DataLoader timed out"):
                self._wait_for_exit()
                self._raise_if_failed()
                raise failure

    def _watch(self) -> None:
        # In a thread: a worker that stops while it sends a batch blocks the rank in the middle of a message.
        last_awaited, polls = -1, 0
        while not self._stopping.wait(POLL_S):
            # Polls in a row at which the rank waits for the same batch.
            polls = polls + 1 if self._awaited == last_awaited >= 0 else 0
            last_awaited = self._awaited
            if polls * POLL_S >= self._timeout.seconds:
                dead = self._dead_worker  # a worker may have died while sending
                # Before the kill, which unblocks the rank: it then raises this message.
                self._failure = self._describe_death(dead) if dead else self._describe_hang(last_awaited)
                self._kill()
                return

    # An exiting worker closes its sockets before it has an exit code.
    def _wait_for_exit(self) -> None:
        ending = wait([process.sentinel for process in self._processes], timeout=POLL_S)
        for process in self._processes:
            if process.sentinel in ending:
                process.join()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    @property
    def _dead_worker(self) -> BaseProcess | None:
        return next((process for process in self._processes if process.exitcode is not None), None)

    def _raise_if_failed(self) -> None:
        dead = self._dead_worker
        failure = self._failure or (self._describe_death(dead) if dead else "")
        if failure:
            self._kill()
            raise WatchError(failure)

    def _describe_death(self, process: BaseProcess) -> str:
        worker, position = next(
            (
                (worker, position)
                for worker, position in enumerate(self._progress.positions())
                if position.pid == process.pid
            ),
            (-1, WorkerPosition(-1, -1, -1)),
        )
        code = process.exitcode or 0
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = _HINT_BY_SIGNAL.get(signal.Signals(-code), "") if code < 0 else ""
        fix = f"{hint}; else " if hint else ""
        return (
            f"data.workers: worker {worker} (pid {process.pid}) {end} {self._describe_position(position)} "
            f"({fix}check that image, or train with data.workers=0 to see the error)"
        )

    def _describe_hang(self, awaited: int) -> str:
        # A worker that has made its last batch keeps that position, so the lowest batch is only the second choice: if
        # no worker is at the batch, it is made and cannot be sent, or its worker has not begun.
        worker, position = self._progress.find_worker(awaited) or min(
            enumerate(self._progress.positions()), key=lambda item: item[1].batch
        )
        return (
            f"data.worker_timeout: no batch for {self._timeout}: worker {worker} (pid {position.pid}) hangs "
            f"{self._describe_position(position)} (check that image and its disk, or raise data.worker_timeout)"
        )

    def _describe_position(self, position: WorkerPosition) -> str:
        if position.batch < 0:
            return "before its first batch"
        sample = f", at sample {position.sample}, {self._name_of(position.sample)}" if position.sample >= 0 else ""
        return f"in {self._describe_batch(position.batch)}{sample}"


def estimate_batch_bytes(num_images: int, form: PixelFormat, size: int) -> int:
    """Return the shared memory in bytes of a batch of images, `size` pixels squared, with labels and draws."""
    # 64 bytes per image: its label and up to seven draws. Each tensor is a file of whole pages.
    return num_images * form.batch_bytes * size * size + num_images * 64 + _TENSORS_PER_BATCH * _PAGE_BYTES


def check_worker_limits(workers: int, prefetch: int, batch_bytes: int, local_ranks: int) -> None:
    """Raise `WorldError` if `workers` workers in each of `local_ranks` ranks exceed shared memory or open files.

    Each worker prefetches `prefetch` batches, and the rank holds one more. `batch_bytes` is a training and an
    evaluation batch together. The soft open-file limit is raised if necessary.
    """
    # Workers for training and for evaluation run at the same time, so both need room.
    if workers:
        _check_shared_memory(workers, prefetch, batch_bytes, local_ranks)
        _check_open_files(workers, prefetch)


def _check_shared_memory(workers: int, prefetch: int, batch_bytes: int, local_ranks: int) -> None:
    if not SHARED_MEMORY.is_dir():
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    needed = local_ranks * (workers * prefetch + 1) * batch_bytes
    if needed > free:
        max_workers = max(0, (free // (local_ranks * batch_bytes) - 1) // prefetch)
        ranks = f" of each of {local_ranks} ranks" if local_ranks > 1 else ""
        raise WorldError(
            f"data.workers: the batches of {count(workers, 'worker')}{ranks} need {_format_bytes(needed)} "
            f"of shared memory, and {SHARED_MEMORY} has {_format_bytes(free)} free "
            f"(set data.workers={max_workers}, or start the container with --shm-size={-(-needed // 2**20) + 1}m)"
        )


def _check_open_files(workers: int, prefetch: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Evaluation workers stay alive, but only those of training and of one evaluation have batches.
    per_worker = _MAX_LOADERS * _FILES_PER_WORKER + 2 * _TENSORS_PER_BATCH * prefetch
    others = _count_open_files() + _SPARE_FILES
    needed = others + workers * per_worker
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard == resource.RLIM_INFINITY or needed <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))
        return
    max_workers = max(0, (hard - others) // per_worker)
    raise WorldError(
        f"data.workers: a rank with {count(workers, 'worker')} opens up to {needed} files, and the limit is {hard} "
        f"(set data.workers={max_workers}, or raise it: ulimit -n {needed})"
    )


def _count_open_files() -> int:
    return sum(1 for _ in _OPEN_FILES_FOLDER.iterdir()) if _OPEN_FILES_FOLDER.is_dir() else 0


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
