"""Pairs of runs: a setting and what it is compared with, one right after the other, on the same samples.

How a pair is made, what tells whether both train alike, and how a run that has failed is called, for ladders and
searches alike. What is kept for it is said by them.
"""

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
"""What torch, C++, Python and cuBLAS say, and how a process ends that the kernel has ended for its memory."""


@dataclass(frozen=True)
class Pair:
    """A run of a setting and one of what it is compared with, made one right after the other with the same seed."""

    here: Outcome
    below: Outcome


@dataclass(frozen=True)
class Pairs:
    """Pairs whose runs all have a result, and the run that `failed`, which ended them; `is_here` says on which side."""

    whole: tuple[Pair, ...]
    failed: Outcome | None = None
    is_here: bool = False

    @property
    def here(self) -> tuple[Outcome, ...]:
        """The runs of the setting."""
        return tuple(pair.here for pair in self.whole)

    @property
    def below(self) -> tuple[Outcome, ...]:
        """The runs of what it is compared with."""
        return tuple(pair.below for pair in self.whole)

    @property
    def ratio(self) -> Interval:
        """How many times as fast the setting is, of at least one pair."""
        return ratio_of(rates(results_of(self.here)), rates(results_of(self.below)))

    def parity(self, after: int) -> ParityResult | None:
        """Return whether both train alike after step `after`; None unless each pair has losses of the same steps."""
        losses = [losses_of(pair.here.rundir, pair.below.rundir, after) for pair in self.whole]
        known = [each for each in losses if each is not None]
        if len(known) < len(losses):
            return None
        return parity_of([here for here, _ in known], [below for _, below in known])


def run_pairs(below: Callable[[int], Outcome], here: Callable[[int], Outcome], repeats: int) -> Pairs:
    """Run pairs 1 to `repeats`, `below` first in the odd ones: what the first run leaves warm then helps either.

    The first run that fails ends it.
    """
    whole: list[Pair] = []
    for turn in range(1, repeats + 1):
        made = run_pair(below, here, turn)
        for is_here, outcome in made.items():
            if outcome.result is None:
                return Pairs(tuple(whole), outcome, is_here)
        whole.append(Pair(here=made[True], below=made[False]))
    return Pairs(tuple(whole))


def run_pair(below: Callable[[int], Outcome], here: Callable[[int], Outcome], turn: int) -> dict[bool, Outcome]:
    """Run pair `turn`, from 1; return its runs as they were made, by whether they are `here`.

    The second run is not made where the first has failed.
    """
    made: dict[bool, Outcome] = {}
    for is_here in there_and_back((False, True), turn):
        made[is_here] = (here if is_here else below)(turn)
        if made[is_here].result is None:
            break
    return made


def has_no_room(outcome: Outcome) -> bool:
    """Return whether a run that has failed did so for want of memory."""
    return _NO_ROOM.search(f"{outcome.error}\n{outcome.said}") is not None


def complaint_of(outcome: Outcome) -> str:
    """Return in a line why a run has failed."""
    return "out of memory" if has_no_room(outcome) else outcome.error


def results_of(outcomes: Sequence[Outcome]) -> tuple[RunResult, ...]:
    """Return the results of those that have one."""
    return tuple(outcome.result for outcome in outcomes if outcome.result is not None)


def rates(results: Sequence[RunResult]) -> list[float]:
    """Return images/s of runs."""
    return [result.throughput.images_per_s for result in results]
