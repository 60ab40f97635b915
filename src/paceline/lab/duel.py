"""A/B test of two settings: pairs of fresh runs on the same samples, compared by speed and training loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from paceline.core.experiments.ladder import ParityResult
from paceline.core.interval import Interval
from paceline.core.results import RunResult, starved_note
from paceline.lab.pairs import PairedRuns, collect_results, format_failure, is_out_of_memory, run_pairs
from paceline.lab.parity import format_parity_caveat, is_disqualifying
from paceline.lab.times import format_speedup
from paceline.lab.trial import Trial, TrialOutcome
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe

ABStatus = Literal["won", "lost", "no_gain", "differs", "no_room", "failed", "starved"]

MIN_GAIN: Final = 1.02
"""Ratio from which a single measurement, which has no interval, counts as faster; chosen, not measured."""


@dataclass
class TrialBench:
    """Runs the measured `recipe` with a patch applied, and counts the runs, reused ones included."""

    recipe: Recipe
    run: Callable[[Trial, int], TrialOutcome]
    num_runs: int = 0

    def run_trial(self, name: str, patch: Patch, steps: int, repeat: int) -> TrialOutcome:
        """Run `steps` measured steps once. Samples and initial weights depend on `turn` only."""
        length = self.recipe.measure.warmup_steps + steps
        assignments = (*patch.assignments, ("train.steps", length), ("seed", self.recipe.seed + repeat - 1))
        self.num_runs += 1
        return self.run(Trial(name, Patch(assignments)), repeat)


@dataclass(frozen=True)
class ABResult:
    """Result of an A/B test: `ratio` is the challenger's images/s over the champion's, None if a run failed.

    `runs` are the challenger's run directories; `why` explains the status in a sentence.
    """

    baseline: tuple[RunResult, ...]
    candidate: tuple[RunResult, ...]
    ratio: Interval | None
    parity: ParityResult | None
    status: ABStatus
    why: str
    runs: tuple[str, ...]


def run_ab_test(
    bench: TrialBench,
    names: tuple[str, str],
    patches: tuple[Patch, Patch],
    *,
    steps: int,
    repeats: int,
    must_match_losses: bool,
) -> ABResult:
    """Run `repeats` pairs of (champion, challenger), and compare them. The first run that fails ends it.

    With `must_match_losses` the challenger must train like the champion.
    """
    pairs = run_pairs(
        lambda turn: bench.run_trial(names[0], patches[0], steps, turn),
        lambda turn: bench.run_trial(names[1], patches[1], steps, turn),
        repeats,
    )
    if pairs.failed is not None:
        return _build_failed_result(pairs, pairs.failed)
    return _evaluate_pairs(pairs, after=bench.recipe.measure.warmup_steps, must_match_losses=must_match_losses)


def classify_failure(outcome: TrialOutcome) -> tuple[ABStatus, str]:
    """Return the status and reason of a failed run."""
    return "no_room" if is_out_of_memory(outcome) else "failed", format_failure(outcome)


def format_run_folders(outcomes: Sequence[TrialOutcome]) -> tuple[str, ...]:
    """Return the run directories, relative to the experiment's."""
    return tuple(f"{each.rundir.path.parent.name}/{each.rundir.path.name}" for each in outcomes)


def _build_failed_result(pairs: PairedRuns, failed: TrialOutcome) -> ABResult:
    status, why = classify_failure(failed)
    if not pairs.is_candidate:
        status, why = "failed", f"its baseline failed: {why}"
    return ABResult(
        collect_results(pairs.baselines),
        collect_results(pairs.candidates),
        None,
        None,
        status,
        why,
        format_run_folders(pairs.candidates),
    )


def _evaluate_pairs(pairs: PairedRuns, *, after: int, must_match_losses: bool) -> ABResult:
    ratio = pairs.ratio
    parity = pairs.parity(after) if must_match_losses else None
    champion, challenger = collect_results(pairs.baselines), collect_results(pairs.candidates)
    status, why = _classify_ratio(ratio)
    if starved := starved_note((*champion, *challenger)):
        status, why = "starved", f"unknown: {starved} ({why})"
    elif status == "won" and parity is not None and is_disqualifying(parity):
        status, why = "differs", parity.why
    elif status == "won" and must_match_losses:
        why += format_parity_caveat(parity)
    return ABResult(champion, challenger, ratio, parity, status, why, format_run_folders(pairs.candidates))


def _classify_ratio(ratio: Interval) -> tuple[ABStatus, str]:
    """Return whether a ratio is a gain: its interval is above 1, or a single pair exceeds `MIN_GAIN`."""
    if ratio.low is None:
        measured = f"{format_speedup(ratio, 3)} in one pair"
        if ratio.value >= MIN_GAIN:
            return "won", measured
        return ("lost", measured) if ratio.value < 1 / MIN_GAIN else ("no_gain", f"{measured}: too little to count")
    measured = f"{format_speedup(ratio, 3)} in {ratio.n} pairs"
    if ratio.is_above(1):
        return "won", measured
    return ("lost", measured) if ratio.is_below(1) else ("no_gain", f"{measured}: not distinguishable from 1")
