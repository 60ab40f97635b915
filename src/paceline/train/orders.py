"""What all ranks do after a step beside the next one: decided by what any of them has met, and alike on each."""

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
    """Whether to save, and whether to save and leave."""

    save: bool
    leave: bool


@dataclass(frozen=True)
class Council:
    """Where the ranks agree, once a step. What one of them asks for is done one step later where there are several."""

    agreement: Agreement
    interrupts: Interrupts
    deadline: Deadline
    alarm: Alarm
    bad_images: OfSplit
    replicas: Replicas

    def after(self, step: int, batch: Batch) -> Orders:
        """Return what is to be done after `step` steps, the last of them on `batch`. Every rank must call it."""
        self.replicas.check(step)
        self.deadline.step(step)
        met = self.bad_images.note(batch.bad)
        leave, save, bad = self.agreement.of(bool(self.interrupts.requested), self.alarm.rings(), met)
        if bad:
            self.bad_images.settle()
        return Orders(save=save > 0, leave=leave > 0)

    def leaves(self) -> bool:
        """Return whether any rank has been asked to leave by now. Every rank must call it, and waits for the others."""
        return bool(self.agreement.union((1,) if self.interrupts.requested else ()))

    def conclude(self) -> None:
        """Take in what the ranks met in the last step, as the state is to be saved. Every rank must call it."""
        *_, bad = self.agreement.settled()
        if bad:
            self.bad_images.settle()
