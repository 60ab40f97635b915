"""After each step, agree across ranks whether to save or stop."""

from dataclasses import dataclass
from typing import NamedTuple

from paceline.data.batch import Batch
from paceline.measure.alarm import Alarm
from paceline.parallel.agreement import Agreement
from paceline.parallel.replicas import Replicas
from paceline.train.bad_images import OfSplit
from paceline.train.deadline import Deadline
from paceline.train.interrupt import Interrupts


class Orders(NamedTuple):
    """Whether to save a checkpoint, and whether to save and stop."""

    save: bool
    leave: bool


@dataclass(frozen=True)
class Council:
    """Agree across ranks once per step. With several ranks, a request takes effect one step later."""

    agreement: Agreement
    interrupts: Interrupts
    deadline: Deadline
    alarm: Alarm
    bad_images: OfSplit
    replicas: Replicas

    def after(self, step: int, batch: Batch) -> Orders:
        """Return the decision after `step` steps, the last of which trained on `batch`. Collective."""
        self.replicas.check(step)
        self.deadline.step(step)
        num_new = self.bad_images.note(batch.bad)
        stop, save, bad = self.agreement.of(bool(self.interrupts.requested), self.alarm.rings(), num_new)
        if bad:
            self.bad_images.settle()
        return Orders(save=save > 0, leave=stop > 0)

    def leaves(self) -> bool:
        """Return whether any rank was asked to stop. Collective, and blocking."""
        return bool(self.agreement.union((1,) if self.interrupts.requested else ()))

    def conclude(self) -> None:
        """Exchange pending bad-image reports across ranks before the state is saved. Collective."""
        *_, bad = self.agreement.settled()
        if bad:
            self.bad_images.settle()
