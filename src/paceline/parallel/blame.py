"""Identify the rank that caused a failure or a hang from the ranks' last heartbeats. Pure functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from paceline.core.stages import CAPTURE, DATA_WAIT, EPOCH_BOUNDARY, EXPOSED, FINISH, OTHER, TRACE, UNFREEZE, WORK

State = Literal["running", "stuck", "failed", "exited"]
"""Reported by the rank: running, without progress for the timeout, failed, or exited normally."""
Condition = Literal["alive", "silent", "stopped", "dead"]
"""Observed by another rank: alive, no heartbeats, stopped by a signal, or process gone."""

# Stages in the order in which a rank reaches them after the same number of steps: of ranks that hang in a collective,
# the one that is behind is to blame. `EXPOSED`, waiting for other ranks, comes before forward and after backward. It
# sorts after both, since any rank that still computes in the same step is the one waited for.
_ORDER: Final = (
    ("start",),
    (TRACE,),
    ("evaluate",),
    ("checkpoint",),
    (EPOCH_BOUNDARY, DATA_WAIT),
    (CAPTURE, UNFREEZE),
    *((name,) for name in WORK if name != DATA_WAIT),
    (EXPOSED,),
    (FINISH,),
)
# Stages of an unfinished step. Not `other`: a step is counted within it.
_STEP_STAGES: Final = (*(name for name in WORK if name != OTHER), EXPOSED)
_STAGE_NUMBERS: Final = {name: number for number, names in enumerate(_ORDER) for name in names}


@dataclass(frozen=True)
class RankStatus:
    """Status of a rank as seen by another."""

    rank: int
    step: int = 0
    stage: str = "start"
    state: State = "running"
    stalled_s: float = 0.0  # without progress
    at: str = ""  # file and line of Python that a stuck rank is at
    silent_s: float | None = 0.0  # since its last heartbeat; None if there was none
    condition: Condition = "alive"
    is_remote: bool = False  # on another machine, which the network may have cut off

    @property
    def location(self) -> str:
        """Step, stage and line of Python, for messages."""
        stage = f"in {self.stage}" if self.stage_number is not None else self.stage or "between stages"
        return f"at step {self.step} {stage}" + (f" ({self.at})" if self.at else "")

    @property
    def stage_number(self) -> int | None:
        """Position of the stage within a step; None if it has no fixed one."""
        # A stage may have a counter: `evaluate, 12`.
        return _STAGE_NUMBERS.get(self.stage.partition(",")[0])


def blame_rank(statuses: Sequence[RankStatus], own_rank: int, *, timed_out: bool, stacks: Callable[[int], str]) -> str:
    """Return one line that names the rank that rank `own_rank` lost or waits for.

    `statuses` are those of all ranks in order. `timed_out` is True after a timeout, False after a broken connection.
    `stacks` returns the file with a rank's stacks, or "".
    """
    # Surest evidence first.
    prefix = f"rank {own_rank} of {len(statuses)}"
    blamed = (
        _find_dead_rank(statuses, timed_out=timed_out)
        or _find_rank_that_ended(statuses, own_rank)
        or _find_straggler(statuses)
    )
    if blamed is None:
        return f"{prefix}: {_describe_deadlock(statuses, own_rank)}{_stack_hint(stacks(own_rank))}"
    blamed_rank, reason = blamed
    subject = prefix if blamed_rank == own_rank else f"{prefix}: rank {blamed_rank}"
    return f"{subject} {reason}{_stack_hint(stacks(blamed_rank))}"


def _find_dead_rank(statuses: Sequence[RankStatus], *, timed_out: bool) -> tuple[int, str] | None:
    for condition in ("dead", "stopped", "silent"):
        for status in statuses:
            if status.condition != condition:
                continue
            heartbeat = "no heartbeat received"
            if status.silent_s is not None:
                heartbeat = f"last heartbeat {status.silent_s:.1f} s ago, {status.location}"
            match condition:
                case "stopped":
                    return status.rank, f"is stopped by a signal ({heartbeat})"
                case "silent" if timed_out:
                    cut_off = ", or its machine is cut off" if status.is_remote else ""
                    return (
                        status.rank,
                        f"does not answer ({heartbeat}: frozen, or in a call that holds the GIL{cut_off})",
                    )
            # A silent rank after a broken connection: on another machine, its process cannot be looked up.
            return status.rank, f"is gone ({heartbeat})"
    return None


def _find_rank_that_ended(statuses: Sequence[RankStatus], own_rank: int) -> tuple[int, str] | None:
    """Return a rank that exited normally, or finishes, while others are still in a step."""
    running = [status for status in statuses if status.stage.partition(",")[0] in _STEP_STAGES]
    for status in statuses:
        has_exited = status.state == "exited" and status.rank != own_rank
        later = next((other for other in running if other.step >= status.step), None)
        if has_exited or (status.stage == FINISH and later is not None):
            location = (later or statuses[own_rank]).location
            reason = f"ended after step {status.step} while others continued, {location}"
            return status.rank, f"{reason}: the ranks have different numbers of steps"
    return None


def _find_straggler(statuses: Sequence[RankStatus]) -> tuple[int, str] | None:
    """Return the rank that is behind: in steps, else in stages, else alone at another line of code."""
    steps = [status.step for status in statuses]
    stages = [status.stage_number for status in statuses]
    numbers = [number for number in stages if number is not None]
    if min(steps) < max(steps):
        last = steps.index(min(steps))
    elif len(numbers) == len(stages) and min(numbers) < max(numbers):
        last = stages.index(min(numbers))
    elif (alone := _find_odd_location([status.at for status in statuses])) is not None:
        last = alone
    else:
        return None
    other = next(status for status in reversed(statuses) if status.rank != last)
    # A rank that moved within the last second is slow, not stuck.
    doing = "makes no progress" if statuses[last].stalled_s > 1.0 else "is late"
    return (
        last,
        f"{doing}: {statuses[last].location} for {statuses[last].stalled_s:.1f} s, rank {other.rank} {other.location}",
    )


def _find_odd_location(locations: Sequence[str]) -> int | None:
    """Return the rank at another line of code than all others, of three or more."""
    if len(locations) < 3 or not all(locations):
        return None
    single = [rank for rank, location in enumerate(locations) if locations.count(location) == 1]
    return single[0] if len(single) == 1 else None


def _describe_deadlock(statuses: Sequence[RankStatus], own_rank: int) -> str:
    still = f"{statuses[own_rank].location} for {statuses[own_rank].stalled_s:.1f} s"
    if len(statuses) == 1:
        return f"no progress: {still}"
    running = [str(status.rank) for status in statuses if status.state == "running" and status.rank != own_rank]
    if statuses[own_rank].state != "running" and running:
        fix = "raise parallel.timeout, or find out why"
        return f"waits for rank {', '.join(running)}, which has not finished: {still} ({fix})"
    return f"all ranks wait for one another: {still}"


def _stack_hint(path: str) -> str:
    return f" (stacks in {path})" if path else ""
