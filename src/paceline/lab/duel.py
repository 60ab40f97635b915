"""A/B test of two settings: pairs of fresh runs on the same samples, compared by speed and training loss."""

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
"""Ratio from which a single measurement, which has no interval, counts as faster; chosen, not measured."""


@dataclass
class Bench:
    """Runs the measured `recipe` with a patch applied, and counts the runs, reused ones included."""

    recipe: Recipe
    run: Callable[[Trial, int], Outcome]
    num_runs: int = 0

    def make(self, name: str, patch: Patch, steps: int, repeat: int) -> Outcome:
        """Run `steps` measured steps once. Samples and initial weights depend on `turn` only."""
        length = self.recipe.measure.warmup_steps + steps
        assignments = (*patch.assignments, ("train.steps", length), ("seed", self.recipe.seed + repeat - 1))
        self.num_runs += 1
        return self.run(Trial(name, Patch(assignments)), repeat)


@dataclass(frozen=True)
class Duel:
    """Result of an A/B test: `ratio` is the challenger's images/s over the champion's, None if a run failed.

    `runs` are the challenger's run directories; `why` explains the status in a sentence.
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
    """Run `repeats` pairs of (champion, challenger), and compare them. The first run that fails ends it.

    With `is_same` the challenger must train like the champion.
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
    """Return the status and reason of a failed run."""
    return "no_room" if has_no_room(outcome) else "failed", complaint_of(outcome)


def folders_of(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the run directories, relative to the experiment's."""
    return tuple(f"{each.rundir.path.parent.name}/{each.rundir.path.name}" for each in outcomes)


def _broken(pairs: Pairs, failed: Outcome) -> Duel:
    status, why = failure_of(failed)
    if not pairs.is_here:
        status, why = "failed", f"its baseline failed: {why}"
    return Duel(results_of(pairs.below), results_of(pairs.here), None, None, status, why, folders_of(pairs.here))


def _judged(pairs: Pairs, *, after: int, is_same: bool) -> Duel:
    ratio = pairs.ratio
    parity = pairs.parity(after) if is_same else None
    champion, challenger = results_of(pairs.below), results_of(pairs.here)
    status, why = _speed(ratio)
    if starved := starved_note((*champion, *challenger)):
        status, why = "starved", f"unknown: {starved} ({why})"
    elif status == "won" and parity is not None and forbids(parity):
        status, why = "differs", parity.why
    elif status == "won" and is_same:
        why += doubt(parity)
    return Duel(champion, challenger, ratio, parity, status, why, folders_of(pairs.here))


def _speed(ratio: Interval) -> tuple[Status, str]:
    """Return whether a ratio is a gain: its interval is above 1, or a single pair exceeds `GAIN`."""
    if ratio.low is None:
        measured = f"{times(ratio, 3)} in one pair"
        if ratio.value >= GAIN:
            return "won", measured
        return ("lost", measured) if ratio.value < 1 / GAIN else ("no_gain", f"{measured}: too little to count")
    measured = f"{times(ratio, 3)} in {ratio.n} pairs"
    if ratio.is_above(1):
        return "won", measured
    return ("lost", measured) if ratio.is_below(1) else ("no_gain", f"{measured}: not distinguishable from 1")
