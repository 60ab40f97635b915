"""Stop a run in time to save it before the time limit of its batch job. Torch-free.

The deadline requests a stop when the time left is below

    lead = margin + 2 · slowest + 2 · save

unless it covers the rest of the run,

    margin + 1.25 · mean · remaining steps + 2 · slowest + remaining evaluations + save

`slowest` is the longest time so far between two points at which the run can stop (after a step, or before a batch of an
evaluation), `save` the slowest checkpoint so far (`checkpoint.grace` for both before the first), `mean` the mean step
time. An evaluation counts as long as the longest so far; before the first its duration is unknown, and the run is
stopped. The lead is `core.goodput.signal_lead` plus a second step, and at most half of the time left after the first
step, so that a job shorter than its lead still trains. `scontrol update TimeLimit` has no effect on a running job.
"""

from collections.abc import Callable
from typing import Final, final

from paceline.core.units import seconds
from paceline.core.world import NEVER, BatchJob, World
from paceline.measure.throughput import unix_s
from paceline.measure.timer import now_s
from paceline.training.state import StepInterval

MARGIN_S: Final = 30.0
"""Time after the save (hashing the weights, writing the result, exiting, requeueing the job), and for clock differences
between hosts. Chosen, not measured. Slurm also grants 30 s by default (KillWait)."""
_STEP_SLACK: Final = 1.25
"""Allowance for remaining steps that are slower than those so far. Chosen, not measured."""
TIME_LIMIT_REASON: Final = "the job's time limit"
"""Reason of the stop request, in place of a signal's name."""


@final
class Deadline:
    """Stop a run before its job ends: call `request_stop` with the seconds left, in time before `end_s`.

    `end_s` is a time of `now`, in seconds. `eval_every` also has the last step of the run; `slowest_save_s` returns 0
    before the first save, for which `grace_s` stands.
    """

    def __init__(
        self,
        end_s: float,
        eval_every: StepInterval,
        slowest_save_s: Callable[[], float],
        request_stop: Callable[[float], None],
        *,
        grace_s: float,
        now: Callable[[], float] = now_s,
    ) -> None:
        self._end_s, self._eval_every = end_s, eval_every
        self._slowest_save_s, self._grace_s = slowest_save_s, grace_s
        self._request_stop, self._now = request_stop, now
        self._step = self._batches = self._num_timed = 0
        self._timed_s = 0.0
        self._step_end_s = self._stop_point_s = now()
        self._max_lead_s = NEVER
        self._slowest_s = self._evaluation_s = 0.0
        self._has_requested = False

    def end_step(self, step: int) -> None:
        """Record the end of a step; request a stop if due."""
        if self._batches:
            self._evaluation_s = max(self._evaluation_s, self._stop_point_s - self._step_end_s)
        is_timed = self._max_lead_s < NEVER
        took_s = self._mark_stop_point()
        if is_timed:
            self._num_timed, self._timed_s = self._num_timed + 1, self._timed_s + took_s
        self._step, self._batches, self._step_end_s = step, 0, self._stop_point_s
        self._request_stop_if_due()

    def begin_eval_batch(self) -> None:
        """Record the start of a batch; request a stop if due."""
        self._mark_stop_point()
        self._batches += 1
        self._request_stop_if_due()

    def _mark_stop_point(self) -> float:
        """Record a moment at which the run can stop; return the seconds since the previous one."""
        # The time before the first such moment is not counted: the model may have been compiled.
        before_s, self._stop_point_s = self._stop_point_s, self._now()
        if self._max_lead_s == NEVER:
            self._max_lead_s = (self._end_s - self._stop_point_s) / 2
        else:
            self._slowest_s = max(self._slowest_s, self._stop_point_s - before_s)
        return self._stop_point_s - before_s

    def _request_stop_if_due(self) -> None:
        if self._has_requested or self._is_ending:
            return
        left_s = self._end_s - self._stop_point_s
        saves_s = 2 * self._slowest_save_s() or self._grace_s
        lead_s = min(MARGIN_S + 2 * self._slowest_s + saves_s, self._max_lead_s)
        if left_s <= lead_s and self._time_needed_s() > left_s:
            self._has_requested = True
            self._request_stop(left_s)

    @property
    def _is_ending(self) -> bool:
        """Whether only the final save remains."""
        return self._step == self._eval_every.last and not self._remaining_evaluations()

    def _time_needed_s(self) -> float:
        """Return the estimated seconds to the end of the run, or infinity if unknown."""
        evaluations = self._remaining_evaluations()
        if not self._num_timed or (evaluations and not self._evaluation_s):
            return NEVER
        evaluated_s = self._stop_point_s - self._step_end_s if self._batches else 0.0
        evaluating_s = max(0.0, evaluations * self._evaluation_s - evaluated_s)
        training_s = _STEP_SLACK * self._timed_s / self._num_timed * (self._eval_every.last - self._step)
        save_s = self._slowest_save_s() or self._grace_s
        return MARGIN_S + training_s + 2 * self._slowest_s + evaluating_s + save_s

    def _remaining_evaluations(self) -> int:
        """Return the number of remaining evaluations, including one in progress."""
        every, last = self._eval_every.every, self._eval_every.last
        if not every:
            return 0
        return last // every - (self._step - 1) // every + (last % every > 0)


def build_deadline(
    batch_job: BatchJob,
    world: World,
    eval_every: StepInterval,
    slowest_save_s: Callable[[], float],
    request: Callable[[str], None],
    warn: Callable[[str], None],
    *,
    grace_s: float,
    unix: Callable[[], float] = unix_s,
    now: Callable[[], float] = now_s,
) -> Deadline | None:
    """Return rank 0's deadline, which calls `request` and `warn` before `batch_job` ends; None on other ranks.

    `unix` returns seconds since 1970, as the job's end; `now` is the monotonic clock used from then on.
    """
    # A job without a known end has none; an end in the past is ignored: the job is still running.
    left_s = batch_job.end_s - unix()
    if not world.is_main or not 0 < left_s < NEVER:
        return None

    def request_stop(left_s: float) -> None:
        request(TIME_LIMIT_REASON)
        warn(f"the job ends in {seconds(left_s)}: saving and stopping (queue it again to resume)")

    return Deadline(now() + left_s, eval_every, slowest_save_s, request_stop, grace_s=grace_s, now=now)
