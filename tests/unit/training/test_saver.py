"""A preempted run reports an error if it could not be saved."""

from types import SimpleNamespace

import pytest

from paceline.core.errors import CheckpointError
from paceline.core.results import CheckpointResult
from paceline.training.goodput import TimeSpent
from paceline.training.saver import CheckpointSaver
from paceline.training.state import TrainState


class Kept:
    """A writer that has saved `saved_step`, after `failed` failures."""

    def __init__(self, saved_step: int, failed: int) -> None:
        self.saved_step, self.failed, self.steps = saved_step, failed, []

    def save(self, step, best_step, snapshot, last="") -> None:
        self.steps.append((step, best_step, snapshot, last))

    def flush(self) -> None:
        self.steps.append("flushed")

    def result(self) -> CheckpointResult:
        return CheckpointResult(saved=1, failed=self.failed, stall_s=0, write_s=0, bytes=0)

    def close(self) -> None: ...


def persistent():
    return SimpleNamespace(state_dict=lambda state, facts: (state.step, facts))


def test_it_saves_what_persists_and_waits_for_it() -> None:
    writer = Kept(7, 0)
    saver = CheckpointSaver(persistent(), {"world_size": 2}, writer, TimeSpent)
    state = TrainState(step=7, best_step=3)
    saver(state)
    saver(state, "preempted")
    assert saver.finish(state, "preempted") == "preempted"
    kept = (7, 3, (7, {"world_size": 2}))
    assert writer.steps == [(*kept, ""), (*kept, "preempted"), "flushed"]


def test_a_run_that_left_without_being_saved_says_so() -> None:
    state = TrainState(step=9)
    with pytest.raises(CheckpointError, match=r"stopped at step 9, .* that of step 7"):
        CheckpointSaver(persistent(), {}, Kept(7, 1), TimeSpent).finish(state, "preempted")
    CheckpointSaver(persistent(), {}, Kept(-1, 0), TimeSpent).finish(state, "preempted")  # checkpoint.every=off


@pytest.mark.parametrize("status", ["completed", "target_reached"])
def test_a_run_whose_final_weights_are_not_on_disk_has_failed(status: str) -> None:
    state = TrainState(step=9)
    assert CheckpointSaver(persistent(), {}, Kept(7, 1), TimeSpent).finish(state, status) == "failed"
    assert CheckpointSaver(persistent(), {}, Kept(9, 1), TimeSpent).finish(state, status) == status
    assert (
        CheckpointSaver(persistent(), {}, Kept(-1, 0), TimeSpent).finish(state, status) == status
    )  # checkpoint.every=off


def test_other_ranks_write_nothing() -> None:
    saver = CheckpointSaver(persistent(), {}, None, TimeSpent)
    saver(TrainState(step=1))
    assert saver.finish(TrainState(step=1), "preempted") == "preempted"
