"""The end of a batch job, seen coming: the run is asked to leave while there is time to save, and not much before.

A run can leave after a step, or before a batch of an evaluation. Leaving takes until the next such moment, and the step
in which the ranks agree (`train.orders`), and the save. So it is asked to when what is left of the job is less than

    lead = margin + 2 · slowest + 2 · save

`slowest` is the longest time between two such moments so far, saves and starts of loaders included, and `save` the
longest that a checkpoint took until it was on disk. Before anything was saved, `checkpoint.grace` stands for both
saves. That is the lead time of a signal (`core.goodput.signal_lead`), but that nothing comes early here, and that a
second step is counted. The lead is never more than half of what was left when the first step was done, so that a job
that is shorter than its lead gets on all the same.

A run that will have ended by then is left alone, which is where there is time for

    needs = margin + 1.25 · mean · steps to come + 2 · slowest + evaluations to come + save

`mean` is that of the steps so far, with saves and starts of loaders and without evaluations, each of which is taken to
be as long as the longest. What one takes is not known before the first, and then it is not counted upon.

The end is what was known when the job's step began. Where it has been put off since, as by `scontrol update TimeLimit`,
the run leaves at the former one, saved.
"""

from collections.abc import Callable
from typing import Final, Protocol, final

from paceline.core.units import seconds
from paceline.core.world import NEVER, BatchJob, World
from paceline.measure.rate import unix_s
from paceline.measure.timing import now_s
from paceline.train.cadence import Cadence

MARGIN_S: Final = 30.0
"""For what follows the save (hashing the weights, the result, the ends of all processes, queueing the job again), and
for clocks of hosts that differ. Chosen, not measured. Slurm, too, gives 30 s more by default (KillWait)."""
_SLACK: Final = 1.25
"""By how much the steps to come may be slower than those so far. Chosen, not measured."""
REASON: Final = "the job's time limit"
"""What the run is asked to leave by, where others are asked by the name of a signal."""


class Deadline(Protocol):
    """See to it that a run leaves before its job ends."""

    def step(self, step: int) -> None:
        """Note that `step` steps are done, which may be followed by an evaluation; ask to leave if it is time."""
        ...

    def look(self) -> None:
        """Note that a batch of an evaluation begins; ask to leave if it is time."""
        ...


class NoDeadline:
    """For a job whose end is not known, and for ranks other than 0: what one asks for, all do."""

    def step(self, step: int) -> None:
        """Do nothing."""

    def look(self) -> None:
        """Do nothing."""


@final
class TimeLimit:
    """Ask to leave before `end_s`, in seconds of `now`, by `leave`, which is told how many seconds are left.

    `evaluation` says after which steps there are evaluations, and which is the last; `slowest_save_s` returns the
    longest that a save took so far, 0 before the first, for which `grace_s` stands.
    """

    def __init__(
        self,
        end_s: float,
        evaluation: Cadence,
        slowest_save_s: Callable[[], float],
        leave: Callable[[float], None],
        *,
        grace_s: float,
        now: Callable[[], float] = now_s,
    ) -> None:
        self._end_s, self._evaluation, self._slowest_save_s, self._leave = end_s, evaluation, slowest_save_s, leave
        self._grace_s, self._now = grace_s, now
        self._step = self._batches = self._num_timed = 0
        self._timed_s = 0.0
        self._stepped_s = self._looked_s = now()
        self._most_s = NEVER
        self._slowest_s = self._evaluation_s = 0.0
        self._has_left = False

    def step(self, step: int) -> None:
        """Note that `step` steps are done, which may be followed by an evaluation; ask to leave if it is time."""
        if self._batches:
            self._evaluation_s = max(self._evaluation_s, self._looked_s - self._stepped_s)
        is_timed = self._most_s < NEVER
        took_s = self._note()
        if is_timed:
            self._num_timed, self._timed_s = self._num_timed + 1, self._timed_s + took_s
        self._step, self._batches, self._stepped_s = step, 0, self._looked_s
        self._decide()

    def look(self) -> None:
        """Note that a batch of an evaluation begins; ask to leave if it is time."""
        self._note()
        self._batches += 1
        self._decide()

    def _note(self) -> float:
        """Note that here the run could leave; return the seconds since it last could.

        Before the first such moment it may have compiled a model.
        """
        before_s, self._looked_s = self._looked_s, self._now()
        if self._most_s == NEVER:
            self._most_s = (self._end_s - self._looked_s) / 2
        else:
            self._slowest_s = max(self._slowest_s, self._looked_s - before_s)
        return self._looked_s - before_s

    def _decide(self) -> None:
        if self._has_left or self._ends_now:
            return
        left_s = self._end_s - self._looked_s
        saves_s = 2 * self._slowest_save_s() or self._grace_s
        lead_s = min(MARGIN_S + 2 * self._slowest_s + saves_s, self._most_s)
        if left_s <= lead_s and self._needs_s() > left_s:
            self._has_left = True
            self._leave(left_s)

    @property
    def _ends_now(self) -> bool:
        """Whether only the last save is to come."""
        return self._step == self._evaluation.last and not self._evaluations_to_come()

    def _needs_s(self) -> float:
        """Return what the run needs to its end, by what it took so far; infinite where that is not known."""
        evaluations = self._evaluations_to_come()
        if not self._num_timed or (evaluations and not self._evaluation_s):
            return NEVER
        evaluated_s = self._looked_s - self._stepped_s if self._batches else 0.0
        judging_s = max(0.0, evaluations * self._evaluation_s - evaluated_s)
        stepping_s = _SLACK * self._timed_s / self._num_timed * (self._evaluation.last - self._step)
        save_s = self._slowest_save_s() or self._grace_s
        return MARGIN_S + stepping_s + 2 * self._slowest_s + judging_s + save_s

    def _evaluations_to_come(self) -> int:
        """Return how many evaluations there are from this step on, one that is under way included."""
        every, last = self._evaluation.every, self._evaluation.last
        if not every:
            return 0
        return last // every - (self._step - 1) // every + (last % every > 0)


def build_deadline(
    batch_job: BatchJob,
    world: World,
    evaluation: Cadence,
    slowest_save_s: Callable[[], float],
    request: Callable[[str], None],
    warn: Callable[[str], None],
    *,
    grace_s: float,
    unix: Callable[[], float] = unix_s,
    now: Callable[[], float] = now_s,
) -> Deadline:
    """Return what calls `request` before `batch_job` ends, and says so by `warn`; rank 0 alone watches.

    An end that has passed is no end: the job still runs. `unix` returns seconds since 1970, in which the end is given;
    from here on it is `now` that counts, a clock that nobody sets.
    """
    left_s = batch_job.end_s - unix()
    if not world.is_main or not 0 < left_s < NEVER:
        return NoDeadline()

    def leave(left_s: float) -> None:
        request(REASON)
        warn(f"the job ends in {seconds(left_s)}: saving and leaving (queue it again, and it goes on)")

    return TimeLimit(now() + left_s, evaluation, slowest_save_s, leave, grace_s=grace_s, now=now)
