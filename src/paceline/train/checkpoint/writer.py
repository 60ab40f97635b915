"""Save while training goes on: copy the state, write the copy in a thread, one at a time, and say what fails.

A checkpoint that cannot be written leaves the ones before as they are. What it means to the run is asked for: a
warning, or its end.
"""

import errno
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, final

from paceline.core.errors import CheckpointError
from paceline.core.results import CheckpointResult
from paceline.core.rundir import removed
from paceline.core.units import count, mib
from paceline.measure.timing import Timer
from paceline.train.checkpoint.folder import FULL_DISK, Checkpoints
from paceline.train.checkpoint.format import Snapshot, is_weights_alone
from paceline.train.checkpoint.staging import HostCopy, InPlace, Staging

_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS}

Last = Literal["", "ended", "preempted"]
"""Whether a checkpoint is the last of a process, of a run that has ended or of one that is to be resumed."""


class _Worker(Protocol):
    """Do one piece of work at a time."""

    @property
    def is_idle(self) -> bool:
        """Whether no work is under way."""
        ...

    def start(self, work: Callable[[], None]) -> None:
        """Begin `work`; none is under way."""
        ...

    def wait(self) -> None:
        """Wait for the last piece, and raise what it raised, once."""
        ...

    def close(self) -> None:
        """Wait, raise nothing, and end."""
        ...


@final
class _AtOnce:
    """Work in the caller's thread."""

    is_idle = True

    def start(self, work: Callable[[], None]) -> None:
        work()

    def wait(self) -> None:
        """Do nothing: it has been done."""

    def close(self) -> None:
        """Do nothing."""


@final
class _InThread:
    """Work in a thread of its own, which the interpreter waits for when it ends."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last = _nothing()

    @property
    def is_idle(self) -> bool:
        return self._last.done()

    def start(self, work: Callable[[], None]) -> None:
        assert self.is_idle, "two checkpoints would be written at a time, one of them from the other's memory"
        self._last = self._pool.submit(work)

    def wait(self) -> None:
        wait([self._last])
        last, self._last = self._last, _nothing()
        last.result()

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def _nothing() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


@final
class Writer:
    """Write the checkpoints of a run, on rank 0 alone.

    `warn` is given one line for each cause that a checkpoint fails by, in the thread that writes, and one with the
    count of those that failed likewise afterwards, once a save succeeds or the run ends. `saved_step` of the
    constructor is the step that the run goes on from, whose checkpoint is on disk; -1 for a new run.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        *,
        background: bool,
        on_failure: Literal["warn", "stop"],
        warn: Callable[[str], None],
        saved_step: int = -1,
    ) -> None:
        self._checkpoints, self._warn, self._stops = checkpoints, warn, on_failure == "stop"
        self._staging: Staging = HostCopy() if background else InPlace()
        self._worker: _Worker = _InThread() if background else _AtOnce()
        self._stall, self._written = Timer(), Timer()
        self._failed = self._total_bytes = 0
        self._failure = ""
        self._cause: int | None = None
        self._likewise: list[int] = []
        self.saved_step = saved_step
        """Newest step known to be on disk, -1 for none."""

    @property
    def slowest_s(self) -> float:
        """The longest that a save took until it was on disk, 0 before the first."""
        return self._written.slowest_s

    def save(self, step: int, best_step: int, snapshot: Snapshot, last: Last = "") -> None:
        """Save `snapshot` as the checkpoint of `step`; it may change as soon as this returns.

        The `last` one of a process, of a run that has ended or is preempted, is given the room that it needs.
        Waits for the one before to be on disk. Raise `CheckpointError` where a failure is to stop the run and there was
        one: of the checkpoint before, or of this one where that is known already.
        """
        with self._stall.turn():
            self._settle()
            began_s = self._written.begin()
            self._worker.start(partial(self._write, step, best_step, self._staging.take(snapshot), began_s, last))
            if self._worker.is_idle:
                self._settle()

    def flush(self) -> None:
        """Wait until all is on disk, or has failed. Raise `CheckpointError` where that is to stop the run."""
        with self._stall.turn():
            self._settle()

    def close(self) -> None:
        """Wait for what is being written, and end. Raises nothing: call `flush` before to know of a failure."""
        self._worker.close()
        self._count_likewise()

    def result(self) -> CheckpointResult:
        """Return what saving came to so far."""
        saved = self._written.turns
        asked = saved + self._failed
        return CheckpointResult(
            saved=saved,
            failed=self._failed,
            stall_s=self._stall.total_s / asked if asked else 0.0,
            write_s=self._written.total_s / saved if saved else 0.0,
            bytes=round(self._total_bytes / saved) if saved else 0,
        )

    def _settle(self) -> None:
        self._worker.wait()
        failure, self._failure = self._failure, ""
        if failure and self._stops:
            raise CheckpointError(failure)

    def _write(self, step: int, best_step: int, snapshot: Snapshot, began_s: float, last: Last) -> None:
        try:
            saved = self._saved(step, best_step, snapshot, last)
        except OSError as error:
            self._failed += 1
            self._failure = _line(self._checkpoints.path_of(step), error, snapshot.num_bytes)
            run = self._checkpoints.folder.parent
            if not run.is_dir():
                self._failure, self._stops = removed(run), True  # whatever else is trained would be lost
            elif error.errno == self._cause:
                self._likewise.append(step)
            else:
                self._count_likewise()
                self._cause = error.errno
                self._warn(self._failure)
            if last:
                self._count_likewise()
        else:
            self._count_likewise()
            self._written.end(began_s)
            self._total_bytes += saved.num_bytes
            self.saved_step = step

    def _saved(self, step: int, best_step: int, snapshot: Snapshot, last: Last) -> Snapshot:
        """Save `snapshot`, and return what of it is on disk: the weights alone where there is no room for more."""
        try:
            self._checkpoints.save(step, best_step, snapshot)
        except OSError as error:
            if not last or error.errno not in FULL_DISK:
                raise
            path = self._checkpoints.save_last(step, best_step, snapshot, is_end=last == "ended")
            how = "older checkpoints were removed to make room for it"
            if is_weights_alone(path):
                snapshot = snapshot.weights_alone()
                how = f"its weights were saved alone, in {mib(snapshot.num_bytes)}, as there was no room for more"
            self._warn(f"{path}: the disk is full: {how} (free some space)")
        return snapshot

    def _count_likewise(self) -> None:
        """Warn of the saves that failed by the cause that was warned of before, in one line."""
        if self._likewise:
            first, last, cause = self._likewise[0], self._likewise[-1], os.strerror(self._cause or 0)
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            failed = count(len(self._likewise), "more checkpoint")
            self._warn(f"{self._checkpoints.folder}: {failed}, of {steps}, failed likewise: {cause}")
        self._cause, self._likewise = None, []


def _line(path: Path, error: OSError, num_bytes: int) -> str:
    """Return what happened to the checkpoint `path` of `num_bytes`, and what to do."""
    what = f"{path}: was not saved: {error.strerror or error}"
    if error.errno in FULL_DISK:
        return f"{what}: needs {mib(num_bytes)}, has {_free(path.parent)} (free some space, or set checkpoint.keep=1)"
    if error.errno in _CLOSED:
        return f"{what} (make {path.parent} writable)"
    return f"{what} (see that {path.parent} stays and its disk works)"


def _free(folder: Path) -> str:
    try:
        return mib(shutil.disk_usage(folder).free)
    except OSError:
        return "an unknown size"
