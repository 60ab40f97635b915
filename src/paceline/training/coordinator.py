"""Agree across ranks after each step whether to save or stop, and which images could not be read."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from paceline.core.dataset import Datasets, Source, Split
from paceline.core.errors import DataError
from paceline.core.interrupts import Interrupts
from paceline.core.units import count
from paceline.data.bad_images import BadImage
from paceline.data.batch import Batch
from paceline.data.verify import find_read_error
from paceline.measure.throughput import IntervalTimer
from paceline.parallel.consensus import Consensus, ReplicaCheck
from paceline.training.preemption import Deadline

_SPLITS: tuple[Split, ...] = ("train", "val")


@dataclass
class BadImageRegistry:
    """Unique bad images of both splits; more than `limit` end the run.

    `known`, part of the saved state, has their IDs: `2 * index` for training, `2 * index + 1` for validation images.
    `all_gather_union` merges the sorted IDs of all ranks; `log_image` is called once per image.
    """

    datasets: Datasets
    limit: int
    all_gather_union: Callable[[Sequence[int]], Sequence[int]]
    log_image: Callable[[dict[str, str | int]], None]
    known: list[int]
    _new: dict[int, str] = field(default_factory=dict)

    def add(self, split: Split, bad: Iterable[BadImage]) -> int:
        """Add bad images of this rank; return how many are new."""
        reasons = {2 * image.index + _SPLITS.index(split): image.reason for image in bad}
        new = {number: reason for number, reason in reasons.items() if number not in self.known}
        self._new |= new
        return len(new)

    def for_split(self, split: Split) -> "SplitBadImages":
        """Return the view of one split."""
        return SplitBadImages(self, split)

    def sync(self) -> None:
        """Exchange new bad images across ranks. Collective. Raise `DataError` if there are too many."""
        for number in self.all_gather_union(sorted(self._new)):
            if number not in self.known:
                self.known.append(number)
                row = {"split": _SPLITS[number % 2], "index": number // 2, "path": self._name(number)}
                self.log_image({**row, "reason": self._new.get(number) or self._reason_on_this_rank(number)})
        self._new.clear()
        if len(self.known) > self.limit:
            raise DataError(
                f"data.max_bad_images: {count(len(self.known), 'image')} cannot be read, more than {self.limit:,}, "
                f"such as {self._name(self.known[-1])} (paceline data verify lists them all; remove them, or raise it)"
            )

    def _reason_on_this_rank(self, number: int) -> str:
        # Only IDs are exchanged: read the image again.
        return find_read_error(self._source(number), number // 2) or "another rank could not read it"

    def _source(self, number: int) -> Source:
        return self.datasets.val if number % 2 else self.datasets.train

    def _name(self, number: int) -> str:
        return self._source(number).name_of(number // 2)


@dataclass(frozen=True)
class SplitBadImages:
    """The bad images of one split."""

    registry: BadImageRegistry
    split: Split

    def add(self, bad: Iterable[BadImage]) -> int:
        """Add bad images of this rank; return how many are new."""
        return self.registry.add(self.split, bad)

    def sync(self) -> None:
        """Exchange new bad images across ranks. Collective."""
        self.registry.sync()


NUM_FLAGS: Final = 4
"""Flags per step: stop, save, new bad images, and whether the time of `train.max_time` is up."""


class StepDecision(NamedTuple):
    """Whether to save a checkpoint, whether to save and stop, and whether the run's time is up."""

    save: bool
    stop: bool
    is_time_up: bool = False


def never_stop() -> bool:
    """Return False: never stop early."""
    return False


@dataclass(frozen=True)
class StepCoordinator:
    """Agree across ranks once per step. With several ranks, a request takes effect one step later."""

    consensus: Consensus
    interrupts: Interrupts
    deadline: Deadline | None
    save_timer: IntervalTimer
    bad_images: SplitBadImages
    replica_check: ReplicaCheck | None
    is_time_up: Callable[[], bool] = never_stop

    def poll(self, step: int, batch: Batch) -> StepDecision:
        """Return the decision after `step` steps, the last of which trained on `batch`. Collective."""
        if self.replica_check:
            self.replica_check.check(step)
        if self.deadline:
            self.deadline.end_step(step)
        num_new = self.bad_images.add(batch.bad)
        stop, save, bad, time_up = self.consensus.all_reduce_flags(
            bool(self.interrupts.requested), self.save_timer.is_due(), num_new, self.is_time_up()
        )
        if bad:
            self.bad_images.sync()
        return StepDecision(save=save > 0, stop=stop > 0, is_time_up=time_up > 0)

    def was_time_up(self) -> bool:
        """Return whether the run's time is up before this process trains. Collective, and blocking."""
        return bool(self.consensus.union((1,) if self.is_time_up() else ()))

    def is_stop_requested(self) -> bool:
        """Return whether any rank was asked to stop. Collective, and blocking."""
        return bool(self.consensus.union((1,) if self.interrupts.requested else ()))

    def flush(self) -> None:
        """Exchange pending bad-image reports across ranks before the state is saved. Collective."""
        _, _, bad, _ = self.consensus.flush()
        if bad:
            self.bad_images.sync()
