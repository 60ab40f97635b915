"""Run pairs of a setting and its baseline, one right after the other, on the same samples."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.experiments.ladder import ParityResult
from paceline.core.interval import Interval, ratio_interval
from paceline.core.results import RunResult
from paceline.lab.parity import assess_parity, read_mean_losses
from paceline.lab.trial import TrialOutcome
from paceline.lab.turns import alternate_order

_OUT_OF_MEMORY: Final = re.compile(
    r"out ?of ?memory|can't allocate memory|not enough memory|std::bad_alloc|MemoryError\b|"
    r"CUBLAS_STATUS_ALLOC_FAILED|signal 9\b|SIGKILL",
    re.I,
)
"""Out-of-memory messages of torch, C++, Python and cuBLAS, and how a process ends that the kernel has killed."""


@dataclass(frozen=True)
class RunPair:
    """A run of a setting (`here`) and one of its baseline (`below`), made back to back with the same seed."""

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
        """Speedup of the setting over the baseline, of at least one pair."""
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
    """Run pairs 1 to `repeats`, in alternating order. The first run that fails ends it."""
    whole: list[RunPair] = []
    for repeat in range(1, repeats + 1):
        # Alternate the order, so that caches warmed by the first run favor neither side.
        outcomes = run_pair(baseline, candidate, repeat)
        for is_candidate, outcome in outcomes.items():
            if outcome.result is None:
                return PairedRuns(tuple(whole), outcome, is_candidate)
        whole.append(RunPair(candidate=outcomes[True], baseline=outcomes[False]))
    return PairedRuns(tuple(whole))


def run_pair(
    baseline: Callable[[int], TrialOutcome], candidate: Callable[[int], TrialOutcome], repeat: int
) -> dict[bool, TrialOutcome]:
    """Run pair `turn`, counted from 1; return its runs in order, by whether they are `here`.

    The second run is skipped if the first fails.
    """
    outcomes: dict[bool, TrialOutcome] = {}
    for is_candidate in alternate_order((False, True), repeat):
        outcomes[is_candidate] = (candidate if is_candidate else baseline)(repeat)
        if outcomes[is_candidate].result is None:
            break
    return outcomes


def is_out_of_memory(outcome: TrialOutcome) -> bool:
    """Return whether a run failed because it was out of memory."""
    return _OUT_OF_MEMORY.search(f"{outcome.error}\n{outcome.stderr}") is not None


def format_failure(outcome: TrialOutcome) -> str:
    """Return the reason of a failed run, in one line."""
    return "out of memory" if is_out_of_memory(outcome) else outcome.error


def collect_results(outcomes: Sequence[TrialOutcome]) -> tuple[RunResult, ...]:
    """Return the results of the outcomes that have one."""
    return tuple(outcome.result for outcome in outcomes if outcome.result is not None)


def collect_throughputs(results: Sequence[RunResult]) -> list[float]:
    """Return the images/s of runs."""
    return [result.throughput.images_per_s for result in results]
