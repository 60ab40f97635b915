"""A/B tests of two settings: pairs of fresh runs on the same samples, compared by speed and by training loss."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from paceline.core.errors import PacelineError
from paceline.core.experiments.results import ParityResult
from paceline.core.results import RunResult, starved_note
from paceline.core.run_dir import RunDir, read_lines
from paceline.core.statistics import Interval, mean_interval, ratio_interval
from paceline.core.units import count
from paceline.lab.repeat import alternate_order
from paceline.lab.trial import Trial, TrialOutcome
from paceline.recipe.load import Patch
from paceline.recipe.schema import Recipe

LOSS_TOLERANCE: Final = 0.02
"""Relative difference of the mean loss that counts as equal.

Even an exact change, such as another memory format, sums in another order, and 16-bit arithmetic rounds on top; runs
then drift apart, more so with small batches. Measured by `paceline ladder` at a tenth of the learning rate: another
number of threads moves the loss by 0.2 % in eight steps of CIFAR-10 at batch 128 and by 1.4 % in ten steps of digits at
batch 32, where bfloat16 moves it by 1.5 % and Adam instead of SGD by 1 to 10 %.
"""
_UNPROVED: Final = "not proved to train alike"
_NO_LOSSES: Final = "no losses of the same steps were recorded after the warm-up (set log.every lower)"
_OUT_OF_MEMORY: Final = re.compile(
    r"out ?of ?memory|can't allocate memory|not enough memory|std::bad_alloc|MemoryError\b|"
    r"CUBLAS_STATUS_ALLOC_FAILED|signal 9\b|SIGKILL",
    re.I,
)
"""Out-of-memory messages of torch, C++, Python and cuBLAS, and how a process ends that the kernel has killed."""
ABStatus = Literal["won", "lost", "no_gain", "differs", "no_room", "failed", "starved"]
MIN_GAIN: Final = 1.02
"""Ratio from which a single measurement, which has no interval, counts as faster; chosen, not measured."""


def format_speedup(ratio: Interval, digits: int = 2, word: str = "x") -> str:
    """Return a speedup such as `1.62x (1.32 to 2.00)`, or `1.62x` without an interval."""
    bounds = ""
    if ratio.low is not None and ratio.high is not None:
        bounds = f" ({ratio.low:.{digits}f} to {ratio.high:.{digits}f})"
    return f"{ratio.value:.{digits}f}{word}{bounds}"


def read_mean_losses(candidate: RunDir, baseline: RunDir, after: int) -> tuple[float, float] | None:
    """Return the mean training losses of two runs over the same steps, all after step `after`; None if unknown."""
    # A record is the mean since the previous one, and the two runs may log at different steps, so compare between the
    # first and last step at which both have a record.
    records = _read_losses(candidate), _read_losses(baseline)
    shared = sorted(step for step in {0, *records[0]} & {0, *records[1]} if step >= after)
    if len(shared) < 2:
        return None
    first, second = (_mean_loss(each, shared[0], shared[-1]) for each in records)
    return (first, second) if math.isfinite(first) and math.isfinite(second) and second else None


def is_disqualifying(parity: ParityResult) -> bool:
    """Return whether losses rule out a setting: they differ, or their mean difference exceeds the tolerance."""
    return parity.verdict == "differs" or abs(parity.gap.value) > parity.tolerance


def format_parity_caveat(parity: ParityResult | None) -> str:
    """Return a caveat on a setting's losses; "" if both train alike."""
    if parity is None:
        return f"; {_UNPROVED}: {_NO_LOSSES}"
    return "" if parity.verdict == "same" else f"; {_UNPROVED}"


def _read_losses(rundir: RunDir) -> dict[int, float]:
    try:
        return {int(record["step"]): float(record["loss"]) for record in read_lines(rundir.steps)}
    except (PacelineError, OSError, KeyError, TypeError, ValueError):
        return {}


def _mean_loss(records: Mapping[int, float], start: int, end: int) -> float:
    total = 0.0
    for before, step in pairwise(sorted({0, *records})):
        if start <= before and step <= end:  # a record covers the steps since the previous one
            total += (step - before) * records[step]
    return total / (end - start)


def assess_parity(candidates: Sequence[float], baselines: Sequence[float]) -> ParityResult:
    """Assess the positive losses of at least one pair of runs, both on the same samples.

    Two settings are equivalent if the whole interval of their difference is small (Schuirmann 1987, doi
    10.1007/BF01068419).
    """
    assert len(candidates) == len(baselines), f"{len(candidates)} and {len(baselines)} losses are no pairs"
    # A non-significant difference is no proof of equivalence: few runs would then prove anything.
    gap = mean_interval([candidate / baseline - 1 for candidate, baseline in zip(candidates, baselines, strict=True)])
    verdict = _classify_gap(gap)
    return ParityResult(
        loss=math.fsum(candidates) / len(candidates),
        loss_below=math.fsum(baselines) / len(baselines),
        gap=gap,
        tolerance=LOSS_TOLERANCE,
        verdict=verdict,
        why=_explain_gap(gap, verdict),
    )


def _classify_gap(gap: Interval) -> Literal["same", "differs", "open"]:
    if gap.low is None or gap.high is None:
        return "open"
    if gap.low >= -LOSS_TOLERANCE and gap.high <= LOSS_TOLERANCE:
        return "same"
    return "differs" if gap.low > LOSS_TOLERANCE or gap.high < -LOSS_TOLERANCE else "open"


def _explain_gap(gap: Interval, verdict: str) -> str:
    pairs = count(gap.n, "pair")
    if gap.low is None or gap.high is None:
        return f"loss {gap.value:+.2%} in one pair, so its scatter is unknown"
    measured = f"loss {gap.value:+.2%} ({gap.low:+.2%} to {gap.high:+.2%}) in {pairs}"
    match verdict:
        case "same":
            return f"{measured}: within {LOSS_TOLERANCE:.0%}"
        case "differs":
            return f"{measured}: beyond {LOSS_TOLERANCE:.0%}"
    return f"{measured}: too few to decide whether within {LOSS_TOLERANCE:.0%}"


@dataclass(frozen=True)
class RunPair:
    """A run of a setting and one of its baseline, made back to back with the same seed."""

    candidate: TrialOutcome
    baseline: TrialOutcome


@dataclass(frozen=True)
class PairedRuns:
    """Pairs in which both runs have a result, and the run that `failed`; `is_candidate` if that was the setting's."""

    complete: tuple[RunPair, ...]
    failed: TrialOutcome | None = None
    is_candidate: bool = False

    @property
    def candidates(self) -> tuple[TrialOutcome, ...]:
        """Runs of the setting."""
        return tuple(pair.candidate for pair in self.complete)

    @property
    def baselines(self) -> tuple[TrialOutcome, ...]:
        """Runs of the baseline."""
        return tuple(pair.baseline for pair in self.complete)

    @property
    def ratio(self) -> Interval:
        """Speedup of the setting over the baseline; needs a pair."""
        return ratio_interval(
            collect_throughputs(collect_results(self.candidates)), collect_throughputs(collect_results(self.baselines))
        )

    def parity(self, after: int) -> ParityResult | None:
        """Return whether both train alike after step `after`; None if a pair lacks losses of the same steps."""
        losses = [read_mean_losses(pair.candidate.rundir, pair.baseline.rundir, after) for pair in self.complete]
        known = [each for each in losses if each is not None]
        if len(known) < len(losses):
            return None
        return assess_parity([candidate for candidate, _ in known], [baseline for _, baseline in known])


def run_pairs(
    baseline: Callable[[int], TrialOutcome], candidate: Callable[[int], TrialOutcome], repeats: int
) -> PairedRuns:
    """Run pairs 1 to `repeats`, in alternating order, up to the first run that fails."""
    complete: list[RunPair] = []
    for repeat in range(1, repeats + 1):
        # Alternate the order, so that caches warmed by the first run favor neither side.
        outcomes = run_pair(baseline, candidate, repeat)
        for is_candidate, outcome in outcomes.items():
            if outcome.result is None:
                return PairedRuns(tuple(complete), outcome, is_candidate)
        complete.append(RunPair(candidate=outcomes[True], baseline=outcomes[False]))
    return PairedRuns(tuple(complete))


def run_pair(
    baseline: Callable[[int], TrialOutcome], candidate: Callable[[int], TrialOutcome], repeat: int
) -> dict[bool, TrialOutcome]:
    """Run pair `repeat`, counted from 1; return its outcomes in order, keyed by whether they are the candidate's."""
    outcomes: dict[bool, TrialOutcome] = {}
    for is_candidate in alternate_order((False, True), repeat):
        outcomes[is_candidate] = (candidate if is_candidate else baseline)(repeat)
        if outcomes[is_candidate].result is None:
            break
    return outcomes


def is_out_of_memory(outcome: TrialOutcome) -> bool:
    """Return whether a run failed for lack of memory."""
    return _OUT_OF_MEMORY.search(f"{outcome.error}\n{outcome.stderr}") is not None


def format_failure(outcome: TrialOutcome) -> str:
    """Return the reason of a failed run, in one line."""
    return "out of memory" if is_out_of_memory(outcome) else outcome.error


def collect_results(outcomes: Sequence[TrialOutcome]) -> tuple[RunResult, ...]:
    """Return the results of the successful runs."""
    return tuple(outcome.result for outcome in outcomes if outcome.result is not None)


def collect_throughputs(results: Sequence[RunResult]) -> list[float]:
    """Return the images/s of runs."""
    return [result.throughput.images_per_s for result in results]


@dataclass
class TrialBench:
    """Run the measured `recipe` with a patch applied, and count the runs, reused ones included."""

    recipe: Recipe
    run: Callable[[Trial, int], TrialOutcome]
    num_runs: int = 0

    def run_trial(self, name: str, patch: Patch, steps: int, repeat: int) -> TrialOutcome:
        """Run `steps` measured steps once. Samples and initial weights depend on `repeat` only."""
        length = self.recipe.measure.warmup_steps + steps
        assignments = (*patch.assignments, ("train.steps", length), ("seed", self.recipe.seed + repeat - 1))
        self.num_runs += 1
        return self.run(Trial(name, Patch(assignments)), repeat)


@dataclass(frozen=True)
class ABResult:
    """Result of an A/B test: `ratio` is the candidate's images/s over the baseline's, None if a run failed.

    `runs` are the candidate's run directories; `why` explains the status.
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
    """Compare the patches of (baseline, candidate) by `repeats` pairs of runs, up to the first run that fails.

    With `must_match_losses` the candidate must train like the baseline.
    """
    pairs = run_pairs(
        lambda repeat: bench.run_trial(names[0], patches[0], steps, repeat),
        lambda repeat: bench.run_trial(names[1], patches[1], steps, repeat),
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
    baselines, candidates = collect_results(pairs.baselines), collect_results(pairs.candidates)
    status, why = _classify_ratio(ratio)
    if starved := starved_note((*baselines, *candidates)):
        status, why = "starved", f"unknown: {starved} ({why})"
    elif status == "won" and parity is not None and is_disqualifying(parity):
        status, why = "differs", parity.why
    elif status == "won" and must_match_losses:
        why += format_parity_caveat(parity)
    return ABResult(baselines, candidates, ratio, parity, status, why, format_run_folders(pairs.candidates))


def _classify_ratio(ratio: Interval) -> tuple[ABStatus, str]:
    # A single pair has no interval, so it must exceed a fixed margin.
    if ratio.low is None:
        measured = f"{format_speedup(ratio, 3)} in one pair"
        if ratio.value >= MIN_GAIN:
            return "won", measured
        return ("lost", measured) if ratio.value < 1 / MIN_GAIN else ("no_gain", f"{measured}: too little to count")
    measured = f"{format_speedup(ratio, 3)} in {ratio.n} pairs"
    if ratio.is_above(1):
        return "won", measured
    return ("lost", measured) if ratio.is_below(1) else ("no_gain", f"{measured}: not distinguishable from 1")
