"""Settle whether one setting is faster than another: pairs of fresh runs, one after the other, and their losses.

Both of a pair train on the same samples in the same order, so that a setting which trains otherwise is found out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from paceline.core.experiments.ladder import ParityResult
from paceline.core.interval import Interval
from paceline.core.results import RunResult, starved_note
from paceline.lab.pairs import Pairs, complaint_of, has_no_room, results_of, run_pairs
from paceline.lab.parity import doubt, forbids
from paceline.lab.times import times
from paceline.lab.trial import Outcome, Trial
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe

Status = Literal["won", "lost", "no_gain", "differs", "no_room", "failed", "starved"]

GAIN: Final = 1.02
"""Ratio from which one measurement, which has no interval, counts as faster; set by hand, not measured."""


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
    """Run `repeats` pairs of (champion, challenger), and judge them.

    With `is_same` the challenger has to train as the champion does. The first run that fails ends it.
    """
    pairs = run_pairs(
        lambda turn: bench.make(names[0], patches[0], steps, turn),
        lambda turn: bench.make(names[1], patches[1], steps, turn),
        repeats,
    )
    if pairs.failed is not None:
        return _broken(pairs, pairs.failed)
    return _judged(pairs, after=bench.recipe.measure.warmup_steps, is_same=is_same)


def failure_of(outcome: Outcome) -> tuple[Status, str]:
    """Return the status of a run that has failed, and why in a line."""
    return "no_room" if has_no_room(outcome) else "failed", complaint_of(outcome)


def folders_of(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the folders of runs below the experiment's."""
    return tuple(f"{each.rundir.path.parent.name}/{each.rundir.path.name}" for each in outcomes)


def _broken(pairs: Pairs, failed: Outcome) -> Duel:
    status, why = failure_of(failed)
    if not pairs.is_here:
        status, why = "failed", f"what it was compared with has failed: {why}"
    return Duel(results_of(pairs.below), results_of(pairs.here), None, None, status, why, folders_of(pairs.here))


def _judged(pairs: Pairs, *, after: int, is_same: bool) -> Duel:
    ratio = pairs.ratio
    parity = pairs.parity(after) if is_same else None
    champion, challenger = results_of(pairs.below), results_of(pairs.here)
    status, why = _speed(ratio)
    if starved := starved_note((*champion, *challenger)):
        status, why = "starved", f"not to be told: {starved} ({why})"
    elif status == "won" and parity is not None and forbids(parity):
        status, why = "differs", parity.why
    elif status == "won" and is_same:
        why += doubt(parity)
    return Duel(champion, challenger, ratio, parity, status, why, folders_of(pairs.here))


def _speed(ratio: Interval) -> tuple[Status, str]:
    """Return whether a ratio is a gain: its interval lies above 1, or, of a single pair, it is large enough."""
    if ratio.low is None:
        found = f"{times(ratio, 3)} in one pair"
        if ratio.value >= GAIN:
            return "won", found
        return ("lost", found) if ratio.value < 1 / GAIN else ("no_gain", f"{found}: too little to tell")
    found = f"{times(ratio, 3)} in {ratio.n} pairs"
    if ratio.is_above(1):
        return "won", found
    return ("lost", found) if ratio.is_below(1) else ("no_gain", f"{found}: not to be told from 1")
