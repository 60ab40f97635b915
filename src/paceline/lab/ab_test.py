"""A/B tests of two settings: pairs of fresh runs on the same samples, compared by speed and by training loss."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
_NO_ROOM: Final = "out of memory"
ABStatus = Literal["won", "lost", "no_gain", "differs", "no_room", "failed", "starved"]
MIN_GAIN: Final = 1.02
"""Ratio from which a single measurement, which has no interval, counts as faster; chosen, not measured."""


def format_speedup(ratio: Interval, digits: int = 2, word: str = "x") -> str:
    """Return a speedup such as `1.62x (1.32 to 2.00)`, or `1.62x` without an interval."""
    bounds = ""
    if ratio.low is not None and ratio.high is not None:
        bounds = f" ({ratio.low:.{digits}f} to {ratio.high:.{digits}f})"
    return f"{ratio.value:.{digits}f}{word}{bounds}"


def format_paired_speedup(ratio: Interval) -> str:
    """Return a speedup with its number of pairs, such as `1.62x (1.32 to 2.00) in 3 pairs`."""
    return f"{format_speedup(ratio)} in {count(ratio.n, 'pair')}"


def decide_by_speed(ratio: Interval, caveat: str, *, at_any_speed: bool) -> tuple[bool, str]:
    """Return whether a rung of a ladder is kept, and why; `caveat` follows the reason of a rung that is kept."""
    measured = format_paired_speedup(ratio)
    if ratio.is_above(1):
        return True, f"faster: {measured}{caveat}"
    what = "slower" if ratio.is_below(1) else "no measurable gain"
    if ratio.n == 1:  # which has no interval
        what = "one pair proves nothing"
    if at_any_speed:
        return True, f"{what}, and kept at any speed: {measured}{caveat}"
    return False, f"{what}: {measured}" + (" (ask for --repeats 3)" if ratio.n == 1 else "")


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
    verdict, why = _classify_gap(gap)
    return ParityResult(
        loss=math.fsum(candidates) / len(candidates),
        loss_below=math.fsum(baselines) / len(baselines),
        gap=gap,
        tolerance=LOSS_TOLERANCE,
        verdict=verdict,
        why=why,
    )


def _classify_gap(gap: Interval) -> tuple[Literal["same", "differs", "open"], str]:
    if gap.low is None or gap.high is None:
        return "open", f"loss {gap.value:+.2%} in one pair, so its scatter is unknown"
    measured = f"loss {gap.value:+.2%} ({gap.low:+.2%} to {gap.high:+.2%}) in {count(gap.n, 'pair')}"
    if gap.low >= -LOSS_TOLERANCE and gap.high <= LOSS_TOLERANCE:
        return "same", f"{measured}: within {LOSS_TOLERANCE:.0%}"
    if gap.low > LOSS_TOLERANCE or gap.high < -LOSS_TOLERANCE:
        return "differs", f"{measured}: beyond {LOSS_TOLERANCE:.0%}"
    return "open", f"{measured}: too few to decide whether within {LOSS_TOLERANCE:.0%}"


@dataclass(frozen=True)
class PairedRuns:
    """Runs of a setting and of its baseline: pair by pair back to back, with the same seed; all have a result.

    `failed` is the run that ended the pairs early; `is_candidate` if that was the setting's.
    """

    baselines: tuple[TrialOutcome, ...]
    candidates: tuple[TrialOutcome, ...]
    failed: TrialOutcome | None = None
    is_candidate: bool = False

    @property
    def baseline_results(self) -> tuple[RunResult, ...]:
        """Results of the baseline."""
        return collect_results(self.baselines)

    @property
    def candidate_results(self) -> tuple[RunResult, ...]:
        """Results of the setting."""
        return collect_results(self.candidates)

    @property
    def ratio(self) -> Interval:
        """Speedup of the setting over the baseline; needs a pair."""
        return ratio_interval(collect_throughputs(self.candidate_results), collect_throughputs(self.baseline_results))

    def parity(self, after: int) -> ParityResult | None:
        """Return whether both train alike after step `after`; None if a pair lacks losses of the same steps."""
        pairs = zip(self.candidates, self.baselines, strict=True)
        losses = [read_mean_losses(candidate.rundir, baseline.rundir, after) for candidate, baseline in pairs]
        known = [each for each in losses if each is not None]
        if len(known) < len(losses):
            return None
        return assess_parity([candidate for candidate, _ in known], [baseline for _, baseline in known])


def run_pairs(
    baseline: Callable[[int], TrialOutcome], candidate: Callable[[int], TrialOutcome], repeats: int
) -> PairedRuns:
    """Run pairs 1 to `repeats`, in alternating order, up to the first run that fails."""
    baselines: tuple[TrialOutcome, ...] = ()
    candidates: tuple[TrialOutcome, ...] = ()
    for repeat in range(1, repeats + 1):
        # Alternate the order, so that caches warmed by the first run favor neither side.
        outcomes = run_pair(baseline, candidate, repeat)
        for is_candidate, outcome in outcomes.items():
            if outcome.result is None:
                return PairedRuns(baselines, candidates, outcome, is_candidate)
        baselines, candidates = (*baselines, outcomes[False]), (*candidates, outcomes[True])
    return PairedRuns(baselines, candidates)


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


def format_failure(outcome: TrialOutcome) -> str:
    """Return the reason of a failed run, in one line."""
    is_out_of_memory = _OUT_OF_MEMORY.search(f"{outcome.error}\n{outcome.stderr}") is not None
    return _NO_ROOM if is_out_of_memory else outcome.error


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
        length = Patch((*patch.assignments, ("train.steps", self.recipe.measure.warmup_steps + steps)))
        self.num_runs += 1
        return self.run(Trial(name, length, first_seed=self.recipe.seed).in_turn(repeat), repeat)


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
    baseline, candidate = (partial(bench.run_trial, *each, steps) for each in zip(names, patches, strict=True))
    pairs = run_pairs(baseline, candidate, repeats)
    ratio, parity = None, None
    if pairs.failed is not None:
        status, why = classify_failure(pairs.failed)
        if not pairs.is_candidate:
            status, why = "failed", f"its baseline failed: {why}"
    else:
        ratio = pairs.ratio
        parity = pairs.parity(bench.recipe.measure.warmup_steps) if must_match_losses else None
        status, why = _classify_ratio(ratio)
        if starved := starved_note((*pairs.baseline_results, *pairs.candidate_results)):
            status, why = "starved", f"unknown: {starved} ({why})"
        elif status == "won" and parity is not None and is_disqualifying(parity):
            status, why = "differs", parity.why
        elif status == "won" and must_match_losses:
            why += format_parity_caveat(parity)
    return ABResult(
        pairs.baseline_results,
        pairs.candidate_results,
        ratio,
        parity,
        status,
        why,
        runs=tuple(each.folder for each in pairs.candidates),
    )


def classify_failure(outcome: TrialOutcome) -> tuple[ABStatus, str]:
    """Return the status and reason of a failed run."""
    why = format_failure(outcome)
    return "no_room" if why == _NO_ROOM else "failed", why


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
