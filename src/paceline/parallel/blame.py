"""Identify the rank that caused a failure from the ranks' last heartbeats. Pure functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from paceline.core.stages import CAPTURE, DATA_WAIT, EPOCH_BOUNDARY, EXPOSED, FINISH, OTHER, TRACE, WORK

State = Literal["runs", "stuck", "failed", "left"]
"""State a rank reports: running, stuck for longer than the timeout, failed, or exited normally (`left`)."""
Condition = Literal["here", "silent", "stopped", "dead"]
"""Observed condition: alive (`here`), no heartbeats, stopped by a signal, or process gone."""

# Stages in the order in which a rank reaches them after the same number of steps. In a collective all ranks look alike,
# so the rank to blame is the one that is behind. A rank waits for others before forward and after backward (`EXPOSED`)
# and computes nothing then, so any rank that works in the same step is behind it: `EXPOSED` comes last but for
# `FINISH`.
_ORDER: Final = (
    ("start",),
    (TRACE,),
    ("evaluate",),
    ("checkpoint",),
    (EPOCH_BOUNDARY, DATA_WAIT),
    (CAPTURE,),
    *((name,) for name in WORK if name != DATA_WAIT),
    (EXPOSED,),
    (FINISH,),
)
# Stages of a step that is not yet counted as done; `other` is left out, as the step is counted in it.
_STEP_STAGES: Final = (*(name for name in WORK if name != OTHER), EXPOSED)
_STAGE_NUMBERS: Final = {name: number for number, names in enumerate(_ORDER) for name in names}


@dataclass(frozen=True)
class RankStatus:
    """Status of a rank as seen by another: steps done, stage, seconds without progress, and its last heartbeat."""

    rank: int
    step: int = 0
    stage: str = "start"
    state: State = "runs"
    still_s: float = 0.0
    at: str = ""  # line of Python that a stuck rank is at
    silent_s: float | None = 0.0  # since its last heartbeat; None if there was none
    condition: Condition = "here"
    is_elsewhere: bool = False  # on another machine, which may be cut off

    @property
    def location(self) -> str:
        """Step, stage and line of Python, for messages."""
        stage = f"in {self.stage}" if self.stage_number is not None else self.stage or "between stages"
        return f"at step {self.step} {stage}" + (f" ({self.at})" if self.at else "")

    @property
    def stage_number(self) -> int | None:
        """Position of the stage in the order of a step; None if it is not in that order."""
        return _STAGE_NUMBERS.get(self.stage.partition(",")[0])


def blame_rank(sights: Sequence[RankStatus], me: int, *, waited: bool, stacks: Callable[[int], str]) -> str:
    """Return one line that names the rank that rank `me` lost or waits for.

    `sights` holds all ranks in order. `waited` is True after a timeout and False after a broken connection. `stacks`
    returns the file with a rank's stacks, or "".
    """
    prefix = f"rank {me} of {len(sights)}"
    blamed = _find_dead_rank(sights, waited=waited) or _find_rank_that_ended(sights, me) or _find_straggler(sights)
    if blamed is None:
        return f"{prefix}: {_describe_deadlock(sights, me)}{_stack_hint(stacks(me))}"
    blamed_rank, reason = blamed
    subject = prefix if blamed_rank == me else f"{prefix}: rank {blamed_rank}"
    return f"{subject} {reason}{_stack_hint(stacks(blamed_rank))}"


def _find_dead_rank(sights: Sequence[RankStatus], *, waited: bool) -> tuple[int, str] | None:
    """Return a rank that is dead, stopped or silent, the surest sign first."""
    for condition in ("dead", "stopped", "silent"):
        for sight in sights:
            if sight.condition != condition:
                continue
            heartbeat = "no heartbeat received"
            if sight.silent_s is not None:
                heartbeat = f"last heartbeat {sight.silent_s:.1f} s ago, {sight.location}"
            match condition:
                case "stopped":
                    return sight.rank, f"is stopped by a signal ({heartbeat})"
                case "silent" if waited:
                    cut_off = ", or its machine is cut off" if sight.is_elsewhere else ""
                    return (
                        sight.rank,
                        f"does not answer ({heartbeat}: frozen, or in a call that holds the GIL{cut_off})",
                    )
            return sight.rank, f"is gone ({heartbeat})"
    return None


def _find_rank_that_ended(sights: Sequence[RankStatus], me: int) -> tuple[int, str] | None:
    """Return a rank that exited normally while others still ran."""
    running = [sight for sight in sights if sight.stage.partition(",")[0] in _STEP_STAGES]
    for sight in sights:
        has_left = sight.state == "left" and sight.rank != me
        later = next((other for other in running if other.step >= sight.step), None)
        if has_left or (sight.stage == FINISH and later is not None):
            location = (later or sights[me]).location
            reason = f"ended after step {sight.step} while others continued, {location}"
            return sight.rank, f"{reason}: the ranks have different numbers of steps"
    return None


def _find_straggler(sights: Sequence[RankStatus]) -> tuple[int, str] | None:
    """Return the rank that is behind: in steps, else in stages, else alone at another line of code."""
    steps = [sight.step for sight in sights]
    stages = [sight.stage_number for sight in sights]
    numbers = [number for number in stages if number is not None]
    if min(steps) < max(steps):
        last = steps.index(min(steps))
    elif len(numbers) == len(stages) and min(numbers) < max(numbers):
        last = stages.index(min(numbers))
    elif (alone := _find_odd_location([sight.at for sight in sights])) is not None:
        last = alone
    else:
        return None
    other = next(sight for sight in reversed(sights) if sight.rank != last)
    doing = "makes no progress" if sights[last].still_s > 1.0 else "is late"
    return (
        last,
        f"{doing}: {sights[last].location} for {sights[last].still_s:.1f} s, rank {other.rank} {other.location}",
    )


def _find_odd_location(locations: Sequence[str]) -> int | None:
    """Return the only rank of three or more that is at another line of code than all others."""
    if len(locations) < 3 or not all(locations):
        return None
    single = [rank for rank, location in enumerate(locations) if locations.count(location) == 1]
    return single[0] if len(single) == 1 else None


def _describe_deadlock(sights: Sequence[RankStatus], me: int) -> str:
    still = f"{sights[me].location} for {sights[me].still_s:.1f} s"
    if len(sights) == 1:
        return f"no progress: {still}"
    running = [str(sight.rank) for sight in sights if sight.state == "runs" and sight.rank != me]
    if sights[me].state != "runs" and running:
        fix = "raise parallel.timeout, or find out why"
        return f"waits for rank {', '.join(running)}, which has not finished: {still} ({fix})"
    return f"all ranks wait for one another: {still}"


def _stack_hint(path: str) -> str:
    return f" (stacks in {path})" if path else ""
