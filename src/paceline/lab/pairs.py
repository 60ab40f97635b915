"""Run pairs of a setting and its baseline, one right after the other, on the same samples."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.experiments.ladder import ParityResult
from paceline.core.interval import Interval, ratio_of
from paceline.core.results import RunResult
from paceline.lab.parity import losses_of, parity_of
from paceline.lab.trial import Outcome
from paceline.lab.turns import there_and_back

_NO_ROOM: Final = re.compile(
    r"out ?of ?memory|can't allocate memory|not enough memory|std::bad_alloc|MemoryError\b|"
    r"CUBLAS_STATUS_ALLOC_FAILED|signal 9\b|SIGKILL",
    re.I,
)
"""Out-of-memory messages of torch, C++, Python and cuBLAS, and how a process ends that the kernel has killed."""


@dataclass(frozen=True)
class Pair:
    """A run of a setting (`here`) and one of its baseline (`below`), made back to back with the same seed."""

    here: Outcome
    below: Outcome


@dataclass(frozen=True)
class Pairs:
    """Pairs in which both runs have a result, and the run that `failed`; `is_here` if that was the setting's."""

    whole: tuple[Pair, ...]
    failed: Outcome | None = None
    is_here: bool = False

    @property
    def here(self) -> tuple[Outcome, ...]:
        """Runs of the setting."""
        return tuple(pair.here for pair in self.whole)

    @property
    def below(self) -> tuple[Outcome, ...]:
        """Runs of the baseline."""
        return tuple(pair.below for pair in self.whole)

    @property
    def ratio(self) -> Interval:
        """Speedup of the setting over the baseline, of at least one pair."""
        return ratio_of(rates(results_of(self.here)), rates(results_of(self.below)))

    def parity(self, after: int) -> ParityResult | None:
        """Return whether both train alike after step `after`; None if a pair lacks losses of the same steps."""
        losses = [losses_of(pair.here.rundir, pair.below.rundir, after) for pair in self.whole]
        known = [each for each in losses if each is not None]
        if len(known) < len(losses):
            return None
        return parity_of([candidate for candidate, _ in known], [baseline for _, baseline in known])


def run_pairs(baseline: Callable[[int], Outcome], candidate: Callable[[int], Outcome], repeats: int) -> Pairs:
    """Run pairs 1 to `repeats`, in alternating order. The first run that fails ends it."""
    whole: list[Pair] = []
    for repeat in range(1, repeats + 1):
        # Alternate the order, so that caches warmed by the first run favor neither side.
        outcomes = run_pair(baseline, candidate, repeat)
        for is_candidate, outcome in outcomes.items():
            if outcome.result is None:
                return Pairs(tuple(whole), outcome, is_candidate)
        whole.append(Pair(here=outcomes[True], below=outcomes[False]))
    return Pairs(tuple(whole))


def run_pair(
    baseline: Callable[[int], Outcome], candidate: Callable[[int], Outcome], repeat: int
) -> dict[bool, Outcome]:
    """Run pair `turn`, counted from 1; return its runs in order, by whether they are `here`.

    The second run is skipped if the first fails.
    """
    outcomes: dict[bool, Outcome] = {}
    for is_candidate in there_and_back((False, True), repeat):
        outcomes[is_candidate] = (candidate if is_candidate else baseline)(repeat)
        if outcomes[is_candidate].result is None:
            break
    return outcomes


def has_no_room(outcome: Outcome) -> bool:
    """Return whether a run failed because it was out of memory."""
    return _NO_ROOM.search(f"{outcome.error}\n{outcome.said}") is not None


def complaint_of(outcome: Outcome) -> str:
    """Return the reason of a failed run, in one line."""
    return "out of memory" if has_no_room(outcome) else outcome.error


def results_of(outcomes: Sequence[Outcome]) -> tuple[RunResult, ...]:
    """Return the results of the outcomes that have one."""
    return tuple(outcome.result for outcome in outcomes if outcome.result is not None)


def rates(results: Sequence[RunResult]) -> list[float]:
    """Return the images/s of runs."""
    return [result.throughput.images_per_s for result in results]
