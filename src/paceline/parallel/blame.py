"""Which rank a run was lost by, from what the ranks last said of themselves. Values in, words out.

Ranks that wait for one another in a collective look alike, so the one that they wait for is the one that is behind.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from paceline.core.stages import CAPTURE, DATA_WAIT, EPOCH_BOUNDARY, EXPOSED, FINISH, OTHER, TRACE, WORK

State = Literal["runs", "stuck", "failed", "left"]
"""What a rank says of itself: it goes on, it has not for too long, it met an error, or it ended in order."""
Condition = Literal["here", "silent", "stopped", "dead"]
"""What is seen of it: it speaks, it does not, a signal has stopped it, or its process is no more."""

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
"""In the order in which a rank with so many steps done comes to them.

A rank comes to waiting for others before forward and after backward. As it does nothing then, whoever works in the same
step is behind it, and so it is last but for what follows all steps.
"""
_STEP_STAGES: Final = (*(name for name in WORK if name != OTHER), EXPOSED)
"""What a rank does only in a step that it has not done yet; `other` is also where the last one is counted."""
_STAGE_NUMBERS: Final = {name: number for number, names in enumerate(_ORDER) for name in names}


@dataclass(frozen=True)
class RankStatus:
    """A rank as another one sees it: how many steps it has done, the stage it is in, and for how long.

    `silent_s` is how long ago it last spoke, None where it never did. `at` is the line of Python it is stuck in, and
    `is_elsewhere` says that it is on another machine, which may be cut off.
    """

    rank: int
    step: int = 0
    stage: str = "start"
    state: State = "runs"
    still_s: float = 0.0
    at: str = ""
    silent_s: float | None = 0.0
    condition: Condition = "here"
    is_elsewhere: bool = False

    @property
    def location(self) -> str:
        """Return where it is, in words."""
        stage = f"in {self.stage}" if self.stage_number is not None else self.stage or "between stages"
        return f"at step {self.step} {stage}" + (f" ({self.at})" if self.at else "")

    @property
    def stage_number(self) -> int | None:
        """Return the place of its stage in the order of a step, or None where it is in none."""
        return _STAGE_NUMBERS.get(self.stage.partition(",")[0])


def blame_rank(sights: Sequence[RankStatus], me: int, *, waited: bool, stacks: Callable[[int], str]) -> str:
    """Return one line that names the rank that the others lost, or wait for, as `me` sees them.

    `sights` has all ranks in order, and `waited` says that time ran out rather than that a connection broke.
    `stacks` returns where a rank has written its stacks, or nothing where it has not.
    """
    here = f"rank {me} of {len(sights)}"
    found = _find_dead_rank(sights, waited=waited) or _find_rank_that_ended(sights, me) or _find_straggler(sights)
    if found is None:
        return f"{here}: {_describe_deadlock(sights, me)}{_stack_hint(stacks(me))}"
    culprit, words = found
    subject = here if culprit == me else f"{here}: rank {culprit}"
    return f"{subject} {words}{_stack_hint(stacks(culprit))}"


def _find_dead_rank(sights: Sequence[RankStatus], *, waited: bool) -> tuple[int, str] | None:
    """Return the rank that is no more, or says nothing: the surest sign first."""
    for condition in ("dead", "stopped", "silent"):
        for sight in sights:
            if sight.condition != condition:
                continue
            heard = "never heard of"
            if sight.silent_s is not None:
                heard = f"last heard of {sight.silent_s:.1f} s before, {sight.location}"
            match condition:
                case "stopped":
                    return sight.rank, f"is stopped by a signal ({heard})"
                case "silent" if waited:
                    others = ", or its machine is cut off" if sight.is_elsewhere else ""
                    return sight.rank, f"does not answer ({heard}: frozen, or in a call that keeps the GIL{others})"
            return sight.rank, f"is gone ({heard})"
    return None


def _find_rank_that_ended(sights: Sequence[RankStatus], me: int) -> tuple[int, str] | None:
    """Return the rank that ended in order while others went on."""
    goes_on = [sight for sight in sights if sight.stage.partition(",")[0] in _STEP_STAGES]
    for sight in sights:
        has_left = sight.state == "left" and sight.rank != me
        later = next((other for other in goes_on if other.step >= sight.step), None)
        if has_left or (sight.stage == FINISH and later is not None):
            place = (later or sights[me]).location
            words = f"ended after step {sight.step} while others went on, {place}"
            return sight.rank, f"{words}: the ranks have different numbers of steps"
    return None


def _find_straggler(sights: Sequence[RankStatus]) -> tuple[int, str] | None:
    """Return the rank that is behind the others: in steps, else in stages, else by standing elsewhere in the code."""
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
    doing = "does nothing" if sights[last].still_s > 1.0 else "is late"
    return (
        last,
        f"{doing}: {sights[last].location} for {sights[last].still_s:.1f} s, rank {other.rank} {other.location}",
    )


def _find_odd_location(places: Sequence[str]) -> int | None:
    """Return the only rank whose line of code is another than that of all others, of three or more that told theirs."""
    if len(places) < 3 or not all(places):
        return None
    single = [rank for rank, place in enumerate(places) if places.count(place) == 1]
    return single[0] if len(single) == 1 else None


def _describe_deadlock(sights: Sequence[RankStatus], me: int) -> str:
    still = f"{sights[me].location} for {sights[me].still_s:.1f} s"
    if len(sights) == 1:
        return f"nothing happens: {still}"
    running = [str(sight.rank) for sight in sights if sight.state == "runs" and sight.rank != me]
    if sights[me].state != "runs" and running:
        fix = "raise parallel.timeout, or find out why"
        return f"waits for rank {', '.join(running)}, which is not done: {still} ({fix})"
    return f"all ranks wait for one another: {still}"


def _stack_hint(path: str) -> str:
    return f" (stacks in {path})" if path else ""
