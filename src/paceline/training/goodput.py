"""Goodput: record the processes of a run in `attempts.jsonl`, and attribute its wall-clock time.

Rank 0 writes a line when training begins, and one when it ends in an orderly way. For a killed process the next one
estimates the end from the last time in `steps.jsonl` and `evals.jsonl`, before their rows are dropped.

Estimated are the wait for data (its share of the measured steps, applied to the measurement warm-up too) and the end of
a killed process, which ran up to one logging interval longer, counted as downtime. So is a process that died before
training began. The stall of the checkpoint that a killed run resumed from counts as rework, as the checkpoint cannot
know it. With `measure.clock=off` all training time is useful. Clocks of hosts are assumed to agree.
"""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from paceline.core.errors import RecipeError
from paceline.core.results import GoodputResult, Status
from paceline.core.run_dir import RunDir, read_lines, write_atomic
from paceline.core.stages import CAPTURE, DATA_WAIT, EPOCH_BOUNDARY, TRACE, UNFREEZE
from paceline.core.units import count
from paceline.core.world import NO_JOB, BatchJob
from paceline.measure.clock import ClockSummary
from paceline.measure.throughput import unix_s

AttemptStatus = Status | Literal["killed"]


@dataclass(frozen=True)
class TimeSpent:
    """Seconds of training time that were not steps, over all processes, without work that was lost."""

    eval_s: float = 0.0
    checkpoint_s: float = 0.0
    data_wait_s: float = 0.0

    def plus(self, summary: ClockSummary) -> "TimeSpent":
        """Return the sum with the measurements of this process."""
        waited_s = summary.stages[DATA_WAIT].device_s if DATA_WAIT in summary.stages else 0.0
        share = waited_s / summary.wall_s if summary.wall_s else 0.0
        return TimeSpent(
            self.eval_s + summary.pauses.get("evaluate", 0.0),
            self.checkpoint_s + summary.pauses.get("checkpoint", 0.0),
            self.data_wait_s + share * (summary.wall_s + summary.warmup_s) + summary.pauses.get(EPOCH_BOUNDARY, 0.0),
        )


class _AttemptRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class AttemptStart(_AttemptRecord):
    """A process that began to train.

    `started_s` is its start (seconds since 1970), `startup_s` the seconds to its first step, `trained_s` the training
    time in the checkpoint of `from_step`. `launch` is `environ.launch_name`, `job_restarts` how often the batch job was
    requeued. `waited_s`, only in the first line, is the time of earlier processes that never trained.
    """

    event: Literal["start"] = "start"
    number: int
    started_s: float
    startup_s: float
    from_step: int
    trained_s: float
    world_size: int
    host: str
    pid: int
    launch: str = ""
    job_id: str = ""
    job_restarts: int = 0
    waited_s: float = 0.0


class AttemptEnd(_AttemptRecord):
    """The end of a process after `step` steps and `trained_s` seconds of the run."""

    event: Literal["end"] = "end"
    number: int
    ended_s: float
    step: int
    trained_s: float
    how: AttemptStatus


@dataclass(frozen=True)
class Attempt:
    """One process of rank 0; `end` is None while it runs, or after a kill without a resume."""

    start: AttemptStart
    end: AttemptEnd | None = None

    @property
    def training_started_s(self) -> float:
        """Time of its first step, in seconds since 1970."""
        return self.start.started_s + self.start.startup_s

    def with_end(self, ended_s: float, step: int, trained_s: float, status: AttemptStatus) -> "Attempt":
        """Return a copy with an end."""
        end = AttemptEnd(number=self.start.number, ended_s=ended_s, step=step, trained_s=trained_s, how=status)
        return Attempt(self.start, end)


def read_attempts(path: Path, warn: Callable[[str], None] = lambda message: None) -> tuple[Attempt, ...]:
    """Return the processes of a run in order. Invalid lines are skipped with one warning."""
    attempts: list[Attempt] = []
    unread: list[int] = []
    invalid: list[int] = []
    for number, row in enumerate(read_lines(path, unread.append), start=1):
        try:
            if row.get("event") == "start":
                attempts.append(Attempt(AttemptStart.model_validate(row)))
                continue
            end = AttemptEnd.model_validate(row)
            if end.number != attempts[-1].start.number:
                raise ValueError(end.number)
            attempts[-1] = Attempt(attempts[-1].start, end)
        except (IndexError, ValueError):
            invalid.append(number + len(unread))  # `number` does not count unreadable lines
    if skipped := sorted(unread + invalid):
        lines = f"line {skipped[0]}" + (f" and {count(len(skipped) - 1, 'more line')}" if skipped[1:] else "")
        warn(f"{path}: {lines} cannot be read: skipped (goodput does not count these processes)")
    return tuple(attempts)


def estimate_last_end(
    attempts: Sequence[Attempt], rundir: RunDir, resumed_trained_s: float = 0.0
) -> tuple[Attempt, ...]:
    """Return `attempts` with an estimated end of the last one if it was killed.

    `resumed_trained_s`, the training time in seconds of the checkpoint to resume from, is a lower bound.
    """
    if not attempts or attempts[-1].end is not None:
        return tuple(attempts)
    *before, last = attempts
    rows = [row for path in (rundir.steps, rundir.evals) for row in read_lines(path, lambda number: None)]
    trained_s = max([last.start.trained_s, resumed_trained_s, *(_number_or_zero(row, "trained_s") for row in rows)])
    step = max([last.start.from_step, *(int(_number_or_zero(row, "step")) for row in rows)])
    ended_s = last.training_started_s + trained_s - last.start.trained_s
    return (*before, last.with_end(ended_s, step, trained_s, "killed"))


def compute_goodput(
    attempts: Sequence[Attempt], trained_s: float, spent: TimeSpent, non_step_s: float = 0.0
) -> GoodputResult:
    """Attribute the wall-clock time of `attempts`, all of which have an end.

    The run has trained for `trained_s` seconds, of which `spent` and `non_step_s` (after the last step, and starting a
    profiler) were not steps.
    """
    ends = [attempt.end for attempt in attempts]
    assert ends and all(ends), "every attempt needs an end"
    startup_s = sum(attempt.start.startup_s for attempt in attempts)
    up_s = sum(
        max(0.0, end.ended_s - attempt.training_started_s) for attempt, end in zip(attempts, ends, strict=True) if end
    )
    down_s = attempts[0].start.waited_s + sum(_downtime_s(before, after) for before, after in pairwise(attempts))
    rework_s = sum(_rework_s(before, after) for before, after in pairwise(attempts))
    recorded_s = trained_s - attempts[0].start.trained_s  # the file may begin later than the run
    parts = {
        "useful_s": max(0.0, recorded_s - spent.eval_s - spent.checkpoint_s - spent.data_wait_s - non_step_s),
        "startup_s": startup_s,
        **asdict(spent),
        "rework_s": rework_s,
        "down_s": down_s,
        "other_s": max(0.0, up_s - rework_s - recorded_s) + non_step_s,
    }
    wall_s = sum(parts.values())  # not from the host's clock, which may have been set back
    share = parts["useful_s"] / wall_s if wall_s else 0.0
    return GoodputResult(share=share, wall_s=wall_s, starts=len(attempts), **parts)


class GoodputTracker:
    """Record this process, the last of `attempts`, in `attempts.jsonl`, and compute the goodput of the run."""

    def __init__(
        self, path: Path, attempts: Sequence[Attempt], spent_before: TimeSpent, now: Callable[[], float]
    ) -> None:
        self._path = path
        self._attempts = tuple(attempts)
        self._spent_before = spent_before
        self._now = now

    def time_spent(self, summary: ClockSummary) -> TimeSpent:
        """Return the time spent so far, earlier processes included."""
        return self._spent_before.plus(summary)

    def goodput(self, trained_s: float, summary: ClockSummary, finish_s: float) -> GoodputResult:
        """Return the goodput so far; `finish_s` of `trained_s` came after `summary`."""
        attempts = self._attempts_until_now(0, trained_s, "completed")
        paused_s = sum(summary.pauses.get(name, 0.0) for name in (TRACE, CAPTURE, UNFREEZE))
        no_step_s = summary.unfinished_s + paused_s + finish_s
        return compute_goodput(attempts, trained_s, self.time_spent(summary), no_step_s)

    @property
    def first_startup_s(self) -> float:
        """Seconds from the start of the first process to its first step."""
        return self._attempts[0].start.startup_s

    def running_s(self) -> float:
        """Return the seconds of all processes so far, without the time between them."""
        return sum(each_s for each_s, _ in self._running_times())

    def rank_hours(self) -> float:
        """Return the hours of all processes so far, times their ranks."""
        return sum(each_s * world_size for each_s, world_size in self._running_times()) / 3600

    def _running_times(self) -> list[tuple[float, int]]:
        """Return the seconds and the number of ranks of each process."""
        *before, last = self._attempts
        past = [(each, each.end.ended_s) for each in before if each.end]
        return [
            (max(0.0, end_s - each.start.started_s), each.start.world_size)
            for each, end_s in (*past, (last, self._now()))
        ]

    def end(self, step: int, trained_s: float, status: Status) -> None:
        """Write the end of this process after `step` steps."""
        # If the disk is full, the next process estimates the end.
        with contextlib.suppress(OSError):
            _write_attempts(self._path, self._attempts_until_now(step, trained_s, status))

    def _attempts_until_now(self, step: int, trained_s: float, status: Status) -> tuple[Attempt, ...]:
        *before, last = self._attempts
        return (*before, last.with_end(self._now(), step, trained_s, status))


def build_goodput_tracker(
    rundir: RunDir,
    world_size: int,
    *,
    from_step: int,
    trained_s: float,
    spent_before: TimeSpent,
    startup_s: float,
    launch: str = "",
    batch_job: BatchJob = NO_JOB,
    first_started_s: float = math.inf,
    warn: Callable[[str], None] = lambda message: None,
    now: Callable[[], float] = unix_s,
) -> GoodputTracker:
    """Record that training begins, `startup_s` seconds after the start of this process; call it on rank 0 only.

    Call it before the rows of lost steps are dropped from `steps.jsonl`. `now` and the run's first start,
    `first_started_s`, are seconds since 1970. Raise `RecipeError` if the file cannot be written.
    """
    attempts = estimate_last_end(read_attempts(rundir.attempts, warn), rundir, trained_s)
    started_s = now() - startup_s
    start = AttemptStart(
        number=attempts[-1].start.number + 1 if attempts else 1,
        started_s=started_s,
        startup_s=startup_s,
        from_step=from_step,
        trained_s=trained_s,
        world_size=world_size,
        host=os.uname().nodename,
        pid=os.getpid(),
        launch=launch,
        job_id=batch_job.number,
        job_restarts=batch_job.restarts,
        waited_s=0.0 if attempts else max(0.0, started_s - first_started_s),
    )
    attempts = (*attempts, Attempt(start))
    try:
        _write_attempts(rundir.attempts, attempts)
    except OSError as error:
        raise RecipeError(f"--run-dir: {rundir.path} cannot be written to: {error.strerror} (name another)") from None
    return GoodputTracker(rundir.attempts, attempts, spent_before, now)


def _number_or_zero(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else 0.0


def _downtime_s(before: Attempt, after: Attempt) -> float:
    assert before.end is not None
    return max(0.0, after.start.started_s - before.end.ended_s)


def _rework_s(before: Attempt, after: Attempt) -> float:
    """Return the trained seconds of `before` that `after` repeats; 0 if the last step was saved."""
    assert before.end is not None
    is_saved = before.end.step == after.start.from_step
    return 0.0 if is_saved else max(0.0, before.end.trained_s - after.start.trained_s)


def _write_attempts(path: Path, attempts: Iterable[Attempt]) -> None:
    rows = [row for attempt in attempts for row in (attempt.start, attempt.end) if row is not None]
    write_atomic(path, "".join(row.model_dump_json() + "\n" for row in rows))
