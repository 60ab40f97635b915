"""Settle whether one setting is faster than another: pairs of fresh runs, one after the other, and their losses.

Both of a pair train on the same samples in the same order, so that a setting which trains otherwise is found out.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from paceline.core.experiments.ladder import ParityResult
from paceline.core.interval import Interval, ratio_of
from paceline.core.results import RunResult
from paceline.lab.parity import mean_loss, parity_of
from paceline.lab.trial import Outcome, Trial
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe

Status = Literal["won", "lost", "no_gain", "differs", "no_room", "failed"]
Assignments = tuple[tuple[str, object], ...]

GAIN: Final = 1.02
"""Ratio from which one measurement, which has no interval, counts as faster; set by hand, not measured."""
_NO_ROOM: Final = re.compile(r"out ?of ?memory|can't allocate memory|not enough memory|signal 9\b|SIGKILL", re.I)
"""What torch says on a GPU and on a CPU, and how a process ends that the kernel has ended for its memory."""


@dataclass
class Bench:
    """Makes runs of the measured `recipe` with a patch over it, and counts them, those too that were there already."""

    recipe: Recipe
    run: Callable[[Trial, int], Outcome]
    num_runs: int = 0

    def make(self, name: str, patch: Patch, steps: int, turn: int) -> Outcome:
        """Run `steps` counted steps once; turns differ in their samples and initial weights, runs of one do not."""
        length = self.recipe.measure.warmup_steps + steps
        sets = (*patch.assignments, ("train.steps", length), ("seed", self.recipe.seed + turn - 1))
        self.num_runs += 1
        return self.run(Trial(name, Patch(sets)), turn)


@dataclass(frozen=True)
class Duel:
    """What pairs of runs came to: `ratio` is the challenger's images/s over the champion's; None where one failed.

    `runs` are the folders of the challenger's runs. `why` says the status in a sentence.
    """

    champion: tuple[RunResult, ...]
    challenger: tuple[RunResult, ...]
    ratio: Interval | None
    parity: ParityResult | None
    status: Status
    why: str
    runs: tuple[str, ...]


def fight(
    bench: Bench, names: tuple[str, str], patches: tuple[Patch, Patch], *, steps: int, repeats: int, is_same: bool
) -> Duel:
    """Run `repeats` pairs of (champion, challenger), the other first in every other one, and judge them.

    With `is_same` the challenger has to train as the champion does. The first run that fails ends it.
    """
    pairs: list[tuple[Outcome, Outcome]] = []
    for turn in range(1, repeats + 1):
        made: dict[int, Outcome] = {}
        for side in (0, 1) if turn % 2 else (1, 0):
            made[side] = bench.make(names[side], patches[side], steps, turn)
            if made[side].result is None:
                return _broken(pairs, made[side], is_challenger=side == 1)
        pairs.append((made[0], made[1]))
    return _judged(pairs, after=bench.recipe.measure.warmup_steps, is_same=is_same)


def failure_of(outcome: Outcome) -> tuple[Status, str]:
    """Return the status of a run that has failed, and why in a line."""
    if _NO_ROOM.search(f"{outcome.error}\n{outcome.said}"):
        return "no_room", "out of memory"
    return "failed", outcome.error


def folders_of(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the folders of runs below the experiment's."""
    return tuple(f"{each.rundir.path.parent.name}/{each.rundir.path.name}" for each in outcomes)


def _broken(pairs: Sequence[tuple[Outcome, Outcome]], last: Outcome, *, is_challenger: bool) -> Duel:
    status, why = failure_of(last)
    if not is_challenger:
        status, why = "failed", f"what it was compared with has failed: {why}"
    return Duel(*_results(pairs), None, None, status, why, folders_of([each for _, each in pairs]))


def _judged(pairs: Sequence[tuple[Outcome, Outcome]], *, after: int, is_same: bool) -> Duel:
    champion, challenger = _results(pairs)
    ratio = ratio_of(
        [each.throughput.images_per_s for each in challenger], [each.throughput.images_per_s for each in champion]
    )
    parity = _parity(pairs, after) if is_same else None
    status, why = _speed(ratio)
    if status == "won" and parity is not None and _differs(parity):
        status, why = "differs", parity.why
    return Duel(champion, challenger, ratio, parity, status, why, folders_of([each for _, each in pairs]))


def _results(pairs: Sequence[tuple[Outcome, Outcome]]) -> tuple[tuple[RunResult, ...], tuple[RunResult, ...]]:
    champion = tuple(one.result for one, _ in pairs if one.result is not None)
    return champion, tuple(other.result for _, other in pairs if other.result is not None)


def _speed(ratio: Interval) -> tuple[Status, str]:
    """Return whether a ratio is a gain: its interval lies above 1, or, of a single pair, it is large enough."""
    if ratio.low is None:
        found = f"{ratio.value:.3f}x in one pair"
        if ratio.value >= GAIN:
            return "won", found
        return ("lost", found) if ratio.value < 1 / GAIN else ("no_gain", f"{found}: too little to tell")
    found = f"{ratio.value:.3f}x ({ratio.low:.3f} to {ratio.high:.3f}) in {ratio.n} pairs"
    if ratio.is_above(1):
        return "won", found
    return ("lost", found) if ratio.is_below(1) else ("no_gain", f"{found}: not to be told from 1")


def _parity(pairs: Sequence[tuple[Outcome, Outcome]], after: int) -> ParityResult | None:
    """Compare losses, where every run has recorded some."""
    losses = [(mean_loss(one.rundir, after), mean_loss(other.rundir, after)) for one, other in pairs]
    known = [(one, other) for one, other in losses if one is not None and other is not None]
    if len(known) < len(pairs):
        return None
    return parity_of([other for _, other in known], [one for one, _ in known])


def _differs(parity: ParityResult) -> bool:
    """Return whether losses differ; those of one pair alone, which have no interval, do where they do by themselves."""
    is_alone = parity.gap.low is None
    return parity.verdict == "differs" or (is_alone and abs(parity.gap.value) > parity.tolerance)
