"""After each step, agree across ranks whether to save or stop."""

from dataclasses import dataclass
from typing import NamedTuple

from paceline.data.batch import Batch
from paceline.measure.alarm import IntervalTimer
from paceline.parallel.agreement import Consensus
from paceline.parallel.replicas import ReplicaCheck
from paceline.train.bad_images import SplitBadImages
from paceline.train.deadline import Deadline
from paceline.train.interrupt import Interrupts


class StepDecision(NamedTuple):
    """Whether to save a checkpoint, and whether to save and stop."""

    save: bool
    stop: bool


@dataclass(frozen=True)
class StepCoordinator:
    """Agree across ranks once per step. With several ranks, a request takes effect one step later."""

    consensus: Consensus
    interrupts: Interrupts
    deadline: Deadline
    alarm: IntervalTimer
    bad_images: SplitBadImages
    replica_check: ReplicaCheck

    def poll(self, step: int, batch: Batch) -> StepDecision:
        """Return the decision after `step` steps, the last of which trained on `batch`. Collective."""
        self.replica_check.check(step)
        self.deadline.end_step(step)
        num_new = self.bad_images.add(batch.bad)
        stop, save, bad = self.consensus.all_reduce_flags(bool(self.interrupts.requested), self.alarm.is_due(), num_new)
        if bad:
            self.bad_images.sync()
        return StepDecision(save=save > 0, stop=stop > 0)

    def is_stop_requested(self) -> bool:
        """Return whether any rank was asked to stop. Collective, and blocking."""
        return bool(self.consensus.union((1,) if self.interrupts.requested else ()))

    def flush(self) -> None:
        """Exchange pending bad-image reports across ranks before the state is saved. Collective."""
        *_, bad = self.consensus.flush()
        if bad:
            self.bad_images.sync()
