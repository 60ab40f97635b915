"""Which rank the others wait for, and how much communication is exposed. Pure functions of measured times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Final

from paceline.core.results import BucketResult, CommunicationResult, RankResult, StragglerResult
from paceline.core.stages import WORK

LATE_SHARE: Final = 0.05
"""Share of a step from which a rank that is the latest counts as late in it."""
CHANCE: Final = 0.01
"""How seldom a rank that is late in half of the steps may be named."""


@dataclass(frozen=True)
class RankTimes:
    """A rank's seconds: means of a step and of its stages, by the device's clock, and those exposed in each step."""

    step_s: float
    stages: Mapping[str, float]
    exposed_s: Sequence[float]


def find_straggler(ranks: Sequence[RankTimes]) -> tuple[tuple[RankResult, ...], StragglerResult]:
    """Return a row for each rank, and what all lose by waiting; `compute_exposed_s` is of the same steps on every rank.

    `late_s` of a rank is how much longer the others waited than it did (a mean over the others, then over steps), and
    `lost_s` how much longer than the one that waited least: what a step would gain if the latest rank came when the
    others do on average. That is a mean, and a single long stall moves it as it moved the run: a median would leave its
    seconds to the wire. `late_steps`, the share of steps in which some rank was late by 5 % of a step, tells one stall
    from many. A rank is named where it is the latest by at least 5 % of a step in so many steps that a rank that is so
    in every other one, by tossing a coin, would be in 1 of 100 cases (one-sided sign test: 7 of 7 steps, 22 of 30, 63
    of 100). Steps in a row resemble one another more than tosses do, which the 5 % are for.
    """
    assert len(ranks) > 1, "a rank alone waits for none"
    assert len({len(rank.exposed_s) for rank in ranks}) == 1, "the ranks have counted other steps"
    steps = list(zip(*(rank.exposed_s for rank in ranks), strict=True))
    lateness = [_lateness(exposed_s) for exposed_s in steps]
    late_s = [_mean_stages([step[rank] for step in lateness]) for rank in range(len(ranks))]
    step_s = _mean_stages([rank.step_s for rank in ranks])
    lost_s = _mean_stages([max(step) for step in lateness])
    rows = tuple(
        RankResult(rank=number, step_s=rank.step_s, late_s=late_s[number], stages=dict(rank.stages))
        for number, rank in enumerate(ranks)
    )
    enough_s = LATE_SHARE * step_s
    found = StragglerResult(
        lost_s=lost_s,
        share=lost_s / step_s if step_s > 0 else 0.0,
        late_steps=_mean_stages([max(step) >= enough_s > 0 for step in lateness]),
    )
    named = _ranks_often_late(lateness, enough_s)
    if named is None:
        return rows, found
    return rows, found.model_copy(update={"rank": named, "stage": _stage_of(named, ranks), "late_s": late_s[named]})


def _lateness(exposed_s: Sequence[float]) -> list[float]:
    """Return, for each rank, the mean of what the others waited in a step less what it waited itself."""
    total_s, num_others = sum(exposed_s), len(exposed_s) - 1
    return [(total_s - own_s) / num_others - own_s for own_s in exposed_s]


def _ranks_often_late(lateness: Sequence[Sequence[float]], enough_s: float) -> int | None:
    """Return the rank that is the latest, by `enough_s` seconds, in more steps than chance explains."""
    latest = [max(range(len(step)), key=step.__getitem__) for step in lateness if max(step) >= enough_s > 0]
    for rank in set(latest):
        if _binomial_tail(latest.count(rank), len(lateness)) <= CHANCE:
            return rank
    return None


def _binomial_tail(heads: int, tosses: int) -> float:
    """Return how likely a fair coin shows at least so many heads."""
    return sum(comb(tosses, number) for number in range(heads, tosses + 1)) / (1 << tosses)


def _stage_of(late: int, ranks: Sequence[RankTimes]) -> str | None:
    """Return the stage in which rank `late` spends most above the others' mean, or None where it is in none above."""

    def excess_s(stage: str) -> float:
        others = [rank.stages.get(stage, 0.0) for number, rank in enumerate(ranks) if number != late]
        return ranks[late].stages.get(stage, 0.0) - _mean_stages(others)

    stage = max(WORK, key=excess_s)
    return stage if excess_s(stage) > 0 else None


def _mean_stages(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def communication_result(
    exposed_s: float, step_s: float, wire_s: float | None = None, buckets: Sequence[BucketResult] = ()
) -> CommunicationResult:
    """Return the result for `compute_exposed_s` of the `step_s` seconds of a step (means).

    `wire_s` is from the first bucket being ready to the last being averaged, None where `buckets` were not timed. What
    of it a step does not wait for is hidden behind backward: `overlap` is 1 - exposed_s / wire_s, and 0 where more is
    exposed than that, as buffers are waited for too.
    """
    share = exposed_s / step_s if step_s > 0 else 0.0
    if wire_s is None:
        return CommunicationResult(exposed_s=exposed_s, share=share)
    return CommunicationResult(
        exposed_s=exposed_s,
        share=share,
        bytes=sum(bucket.bytes for bucket in buckets),
        wire_s=wire_s,
        overlap=max(0.0, 1 - exposed_s / wire_s) if wire_s > 0 else 0.0,
        buckets=tuple(buckets),
    )
