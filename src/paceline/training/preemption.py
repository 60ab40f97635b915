"""Stop a run in time to save it: on a signal, or before the time limit of its batch job. Torch-free.

Saving needs collectives, so a signal handler only takes note, and the run stops after the current step. A rank inside a
collective runs no handler; if the collective never returns, the launcher ends the rank.

The deadline requests a stop when the time left is below

    lead = margin + 2 · slowest + 2 · save

`slowest` is the longest time so far between two moments at which the run can stop (after a step, or before a batch of
an evaluation), saves and loader starts included; `save` is the slowest checkpoint so far, and `checkpoint.grace` stands
for both saves before the first. This is `core.goodput.signal_lead` plus a second step. The lead is at most half of the
time that was left after the first step, so a job shorter than its lead still trains.

A run that will finish in time is not stopped, that is, if the time left covers

    needs = margin + 1.25 · mean · remaining steps + 2 · slowest + remaining evaluations + save

`mean` is the mean step time so far, without evaluations; each evaluation is assumed to take as long as the longest.
Before the first one its duration is unknown, and the run is stopped. The time limit is the one known when the job step
began: extending it with `scontrol update TimeLimit` has no effect.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Final, Protocol, Self, final

from paceline.core.process import STOP_SIGNALS
from paceline.core.units import seconds
from paceline.core.world import NEVER, BatchJob, World
from paceline.measure.throughput import unix_s
from paceline.measure.timer import now_s
from paceline.training.state import StepInterval

_STDERR: Final = 2


class Interrupts:
    """Record the signals that arrive in this context, and restore the previous handlers after it.

    A signal that was ignored at start, such as SIGHUP under `nohup`, stays ignored. A second SIGINT raises
    `KeyboardInterrupt`. Outside of the main thread only `request` works. The context may be nested.

    With `announces`, the first signal prints a line to stderr, since the current step may take a while.
    """

    def __init__(self, *, announces: bool = False) -> None:
        self._announces = announces
        self._requested = ""
        self._has_interrupted = False
        self._before: list[tuple[signal.Signals, signal._HANDLER]] = []
        self._depth = 0

    @property
    def requested(self) -> str:
        """Name of the first signal or `request`, or an empty string."""
        return self._requested

    def request(self, name: str) -> None:
        """Request a stop like signal `name`, from any thread. The first request wins."""
        self._requested = self._requested or name

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth > 1 or threading.current_thread() is not threading.main_thread():
            return self
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            # None: installed by non-Python code, and cannot be restored.
            if handler is not None and handler != signal.SIG_IGN:
                signal.signal(number, self._note)
                self._before.append((number, handler))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        while self._before and not self._depth:
            number, handler = self._before.pop()
            if signal.getsignal(number) == self._note:  # unless it was set to ignored meanwhile
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._has_interrupted:
                raise KeyboardInterrupt
            self._has_interrupted = True
        if self._announces and not self._requested:
            _print_stopping(signal.Signals(number).name)
        self.request(signal.Signals(number).name)


def _print_stopping(name: str) -> None:
    """Write the line unbuffered: the signal may have interrupted a buffered write."""
    line = f"stopping after this step ({name}): the run is being saved\n"
    with contextlib.suppress(OSError):
        os.write(_STDERR, (f"\n{line}" if os.isatty(_STDERR) else line).encode())  # below a progress bar


MARGIN_S: Final = 30.0
"""Time after the save (hashing the weights, writing the result, exiting, requeueing the job), and for clock differences
between hosts. Chosen, not measured. Slurm also grants 30 s by default (KillWait)."""
_STEP_SLACK: Final = 1.25
"""Allowance for remaining steps that are slower than those so far. Chosen, not measured."""
TIME_LIMIT_REASON: Final = "the job's time limit"
"""Reason of the stop request, in place of a signal's name."""


class Deadline(Protocol):
    """Stop a run before its job ends."""

    def end_step(self, step: int) -> None:
        """Record that `step` steps are done; request a stop if it is time."""
        ...

    def begin_eval_batch(self) -> None:
        """Record that a batch of an evaluation begins; request a stop if it is time."""
        ...


class NoDeadline:
    """For jobs without a known end, and for ranks other than 0: a stop request of one rank stops all."""

    def end_step(self, step: int) -> None:
        """Do nothing."""

    def begin_eval_batch(self) -> None:
        """Do nothing."""


@final
class TimeLimitDeadline:
    """Call `request_stop` with the seconds left, in time before `end_s` (seconds of `now`).

    `evaluation` is the evaluation interval, which also has the last step; `slowest_save_s` returns the longest save so
    far in seconds, or 0 before the first, for which `grace_s` stands.
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
        """Record that `step` steps are done; request a stop if it is time."""
        if self._batches:
            self._evaluation_s = max(self._evaluation_s, self._stop_point_s - self._step_end_s)
        is_timed = self._max_lead_s < NEVER
        took_s = self._mark_stop_point()
        if is_timed:
            self._num_timed, self._timed_s = self._num_timed + 1, self._timed_s + took_s
        self._step, self._batches, self._step_end_s = step, 0, self._stop_point_s
        self._request_stop_if_due()

    def begin_eval_batch(self) -> None:
        """Record that a batch of an evaluation begins; request a stop if it is time."""
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
) -> Deadline:
    """Return a deadline that calls `request` before `batch_job` ends, and warns. Only rank 0 has one.

    `unix` returns seconds since 1970, in which the job's end is given; `now` is the monotonic clock used from then on.
    """
    # An end in the past is ignored: the job is still running.
    left_s = batch_job.end_s - unix()
    if not world.is_main or not 0 < left_s < NEVER:
        return NoDeadline()

    def request_stop(left_s: float) -> None:
        request(TIME_LIMIT_REASON)
        warn(f"the job ends in {seconds(left_s)}: saving and stopping (queue it again to resume)")

    return TimeLimitDeadline(now() + left_s, eval_every, slowest_save_s, request_stop, grace_s=grace_s, now=now)
