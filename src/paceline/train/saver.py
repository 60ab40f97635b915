"""Gather the training state of all ranks, and save it on rank 0."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.core.errors import CheckpointError
from paceline.core.results import CheckpointResult, Status
from paceline.train.attempts import TimeSpent
from paceline.train.checkpoint import FinalSave, Snapshot
from paceline.train.persist import TrainingState
from paceline.train.state import TrainState


class CheckpointWriter(Protocol):
    """Write snapshots to disk, possibly in the background."""

    @property
    def saved_step(self) -> int:
        """Newest step known to be on disk, or -1."""
        ...

    @property
    def slowest_s(self) -> float:
        """Longest time, in seconds, until a save was on disk; 0 before the first."""
        ...

    def save(self, step: int, best_step: int, snapshot: Snapshot, final: FinalSave = "") -> None:
        """Save `snapshot`, whose tensors may change afterwards; the `final` one may remove older checkpoints to fit."""
        ...

    def flush(self) -> None:
        """Wait until all saves are on disk or have failed."""
        ...

    def result(self) -> CheckpointResult:
        """Return the statistics of all saves."""
        ...

    def close(self) -> None:
        """Shut down."""
        ...


class NoCheckpointWriter:
    """For ranks that do not write."""

    saved_step = -1
    slowest_s = 0.0

    def save(self, step: int, best_step: int, snapshot: Snapshot, final: FinalSave = "") -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def result(self) -> CheckpointResult:
        """Return zero saves."""
        return CheckpointResult(saved=0, failed=0, stall_s=0.0, write_s=0.0, bytes=0)

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class CheckpointSaver:
    """Save the state of all ranks, with the values `checkpoint_values` and the time `time_spent`. Collective."""

    training_state: TrainingState
    checkpoint_values: Mapping[str, Any]
    writer: CheckpointWriter
    time_spent: Callable[[], TimeSpent]

    def __call__(self, state: TrainState, final: FinalSave = "") -> None:
        """Save `state` and the training state."""
        state.spent = self.time_spent()
        self.writer.save(
            state.step, state.best_step, self.training_state.state_dict(state, self.checkpoint_values), final
        )

    def finish(self, state: TrainState, status: Status) -> Status:
        """Wait until all is on disk; return the final status: `failed` if the final weights were not saved, as only
        rank 0 knows.

        Raise `CheckpointError` if a preempted run could not be saved.
        """
        self.writer.flush()
        is_lost = self.writer.result().failed and self.writer.saved_step != state.step
        if is_lost and status == "preempted":
            last = f"is that of step {self.writer.saved_step}" if self.writer.saved_step >= 0 else "is an earlier one"
            raise CheckpointError(
                f"train: the run stopped at step {state.step}, which could not be saved; the last checkpoint {last} "
                f"(see the warnings, and resume)"
            )
        return "failed" if is_lost else status

    def close(self) -> None:
        """Shut down the writer."""
        self.writer.close()
