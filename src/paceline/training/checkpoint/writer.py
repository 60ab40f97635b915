"""Write checkpoints in a background thread, one at a time, from copies in host memory, and report failures."""

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from copy import deepcopy
from pathlib import Path
from typing import Literal, final

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError
from paceline.core.results import CheckpointResult
from paceline.core.run_dir import removed_error
from paceline.core.units import count, mib
from paceline.measure.timer import StageTimer
from paceline.parallel.device import create_thread_pool
from paceline.training.checkpoint.format import Snapshot, is_weights_only
from paceline.training.checkpoint.storage import DISK_FULL_ERRORS, CheckpointStorage

FinalSave = Literal["", "ended", "preempted"]
"""Whether a checkpoint is the final one of its process, which may remove older ones to fit, and why.

Only that of a run at its end (`ended`) may have weights alone: `preempted` is any run that may be continued.
"""
_PERMISSION_ERRORS = {errno.EACCES, errno.EPERM, errno.EROFS}


@final
class HostMemoryStaging:
    """Copy all tensors to host memory, so that training can continue."""

    def __init__(self) -> None:
        # Reused, since page faults are slow: 335 MB take 0.025 s into used memory, 0.75 s into new memory (measured).
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def stage(self, snapshot: Snapshot) -> Snapshot:
        """Return a complete copy on the CPU. Synchronizes with each device once, at the end."""
        live = {(part, name): each for part, tensors in snapshot.tensors.items() for name, each in tensors.items()}
        self._buffers = {key: self._buffer(key, tensor) for key, tensor in live.items()}
        with torch.no_grad():
            for key, tensor in live.items():
                self._buffers[key].copy_(tensor, non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in live.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return Snapshot(self._staged_tensors(snapshot.tensors), deepcopy(dict(snapshot.values)), snapshot.eval_groups)

    def _buffer(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        """Return a buffer for `tensor`, in its layout; pinned for a GPU tensor, so that the copy is asynchronous."""
        buffer = self._buffers.get(key)
        if buffer is not None and buffer.dtype == tensor.dtype and buffer.shape == tensor.shape:
            return buffer
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)

    def _staged_tensors(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        return {part: {name: self._buffers[part, name] for name in named} for part, named in tensors.items()}


@final
class CheckpointWriter:
    """Write the checkpoints of a run, on rank 0 only.

    `warn` gets one line per cause of failure, from the writing thread, and one with the number of repeated failures
    once a save succeeds or the run ends. `saved_step` is initially the step that the run resumes from, or -1.
    """

    def __init__(
        self,
        checkpoints: CheckpointStorage,
        *,
        background: bool,
        on_failure: Literal["warn", "stop"],
        warn: Callable[[str], None],
        saved_step: int = -1,
    ) -> None:
        self._checkpoints, self._warn, self._stops = checkpoints, warn, on_failure == "stop"
        self._staging = HostMemoryStaging() if background else None
        self._pool = create_thread_pool(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._stall, self._written = StageTimer(), StageTimer()
        self._failed = self._total_bytes = 0
        self._failure = ""
        self._cause: int | None = None
        self._repeated_steps: list[int] = []
        self.saved_step = saved_step
        """Newest step known to be on disk, -1 for none."""

    @property
    def slowest_s(self) -> float:
        """Longest time, in seconds, until a save was on disk; 0 before the first."""
        return self._written.slowest_s

    def save(self, step: int, best_step: int, snapshot: Snapshot, final: FinalSave = "") -> None:
        """Wait for the previous save, then save `snapshot`, whose tensors may change once this returns.

        Raise `CheckpointError` if failures end the run and a save has failed.
        """
        with self._stall.turn():
            self._wait_and_raise()
            began_s = self._written.begin()
            if self._staging:
                staged = self._staging.stage(snapshot)
                self._pending = self._pool.submit(self._write, step, best_step, staged, began_s, final)
            else:
                self._write(step, best_step, snapshot, began_s, final)
                self._wait_and_raise()

    def flush(self) -> None:
        """Wait until all saves are on disk or have failed. Raise `CheckpointError` if failures end the run."""
        with self._stall.turn():
            self._wait_and_raise()

    def close(self) -> None:
        """Wait and shut down without raising; call `flush` before to learn of failures."""
        self._pool.shutdown(wait=True)
        self._warn_of_repeats()

    def result(self) -> CheckpointResult:
        """Return the statistics of all saves so far."""
        saved = self._written.turns
        attempted = saved + self._failed
        return CheckpointResult(
            saved=saved,
            failed=self._failed,
            stall_s=self._stall.total_s / attempted if attempted else 0.0,
            write_s=self._written.total_s / saved if saved else 0.0,
            bytes=round(self._total_bytes / saved) if saved else 0,
        )

    def _wait_and_raise(self) -> None:
        pending, self._pending = self._pending, None
        if pending:
            pending.result()
        failure, self._failure = self._failure, ""
        if failure and self._stops:
            raise CheckpointError(failure)

    def _write(self, step: int, best_step: int, snapshot: Snapshot, began_s: float, final: FinalSave) -> None:
        try:
            saved = self._save_what_fits(step, best_step, snapshot, final)
        except OSError as error:
            self._failed += 1
            keeps_several = self._checkpoints.policy.num_newest > 1
            path = self._checkpoints.path_of(step)
            self._failure = _describe_failure(path, error, snapshot.num_bytes, keeps_several=keeps_several)
            run = self._checkpoints.folder.parent
            if not run.is_dir():
                self._failure, self._stops = removed_error(run), True  # further training would be lost
            elif error.errno == self._cause:
                self._repeated_steps.append(step)
            else:
                self._warn_of_repeats()
                self._cause = error.errno
                self._warn(self._failure)
            if final:
                self._warn_of_repeats()
        else:
            self._warn_of_repeats()
            self._written.end(began_s)
            self._total_bytes += saved.num_bytes
            self.saved_step = step

    def _save_what_fits(self, step: int, best_step: int, snapshot: Snapshot, final: FinalSave) -> Snapshot:
        """Save `snapshot`; return what was written, the weights alone if the disk has no room for more."""
        try:
            self._checkpoints.save(step, best_step, snapshot)
        except OSError as error:
            if not final or error.errno not in DISK_FULL_ERRORS:
                raise
            path = self._checkpoints.save_last(step, best_step, snapshot, is_end=final == "ended")
            how = "older checkpoints were removed to make room for it"
            if is_weights_only(path):
                snapshot = snapshot.weights_only()
                how = f"only its weights were saved, in {mib(snapshot.num_bytes)}, as there was no room for more"
            self._warn(f"{path}: the disk is full: {how} (free some space)")
        return snapshot

    def _warn_of_repeats(self) -> None:
        """Warn of repeated failures with the same cause, in one line."""
        if self._repeated_steps:
            first, last, cause = self._repeated_steps[0], self._repeated_steps[-1], os.strerror(self._cause or 0)
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            failed = count(len(self._repeated_steps), "more checkpoint")
            self._warn(f"{self._checkpoints.folder}: {failed}, of {steps}, failed for the same reason: {cause}")
        self._cause, self._repeated_steps = None, []


def _describe_failure(path: Path, error: OSError, num_bytes: int, *, keeps_several: bool) -> str:
    """Return the error message for checkpoint `path` of `num_bytes`, with a fix."""
    what = f"{path}: was not saved: {error.strerror or error}"
    if error.errno in DISK_FULL_ERRORS:
        space = f"needs {mib(num_bytes)}, has {_describe_free_space(path.parent)}"
        return f"{what}: {space} (free some space{', or set checkpoint.keep=1' if keeps_several else ''})"
    if error.errno in _PERMISSION_ERRORS:
        return f"{what} (make {path.parent} writable)"
    return f"{what} (check that {path.parent} exists and its disk works)"


def _describe_free_space(folder: Path) -> str:
    try:
        return mib(shutil.disk_usage(folder).free)
    except OSError:
        return "an unknown size"
