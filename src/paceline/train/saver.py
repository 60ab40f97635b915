"""Save a run: what persists of it is gathered from all ranks, and rank 0 writes it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.core.errors import CheckpointError
from paceline.core.results import CheckpointResult, Status
from paceline.train.attempts import Spent
from paceline.train.checkpoint import Last, Snapshot
from paceline.train.persist import Persistent
from paceline.train.state import TrainState


class Writes(Protocol):
    """Bring snapshots to disk, perhaps while training goes on."""

    @property
    def saved_step(self) -> int:
        """The newest step that is known to be on disk, -1 for none."""
        ...

    @property
    def slowest_s(self) -> float:
        """The longest in seconds that a save took until it was on disk, 0 before the first."""
        ...

    def save(self, step: int, best_step: int, snapshot: Snapshot, last: Last = "") -> None:
        """Take `snapshot`, whose tensors may change afterwards; the `last` one is given the room that it needs."""
        ...

    def flush(self) -> None:
        """Wait until everything taken is on disk, or has failed."""
        ...

    def result(self) -> CheckpointResult:
        """Return what saving has come to."""
        ...

    def close(self) -> None:
        """Let go."""
        ...


class NoWriter:
    """For ranks that do not write."""

    saved_step = -1
    slowest_s = 0.0

    def save(self, step: int, best_step: int, snapshot: Snapshot, last: Last = "") -> None:
        """Drop it."""

    def flush(self) -> None:
        """Wait for nothing."""

    def result(self) -> CheckpointResult:
        """Return nothing saved."""
        return CheckpointResult(saved=0, failed=0, stall_s=0.0, write_s=0.0, bytes=0)

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Saver:
    """Save the state of all ranks, each of which must call it; `facts` go along, and what the time was `spent` on."""

    persistent: Persistent
    facts: Mapping[str, Any]
    writer: Writes
    spent: Callable[[], Spent]

    def __call__(self, state: TrainState, last: Last = "") -> None:
        """Save `state` and what goes with it."""
        state.spent = self.spent()
        self.writer.save(state.step, state.best_step, self.persistent.capture(state, self.facts), last)

    def finish(self, state: TrainState, status: Status) -> Status:
        """Wait until all is on disk; return how the run has ended: `failed` where its final weights are not.

        Only rank 0 knows. Raise `CheckpointError` where a run that is preempted could not be saved.
        """
        self.writer.flush()
        is_lost = self.writer.result().failed and self.writer.saved_step != state.step
        if is_lost and status == "preempted":
            last = f"is that of step {self.writer.saved_step}" if self.writer.saved_step >= 0 else "is an earlier one"
            raise CheckpointError(
                f"train: the run left at step {state.step}, which could not be saved; the last checkpoint {last} "
                f"(see the warnings, and resume)"
            )
        return "failed" if is_lost else status

    def close(self) -> None:
        """Let go of what writes."""
        self.writer.close()
