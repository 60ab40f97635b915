"""Which rank the others wait for, and how much communication is exposed. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Final

from paceline.core.results import BucketResult, CommunicationResult, RankResult, StragglerResult
from paceline.core.stages import EXPOSED

LATE_SHARE: Final = 0.05
"""Share of a step by which the latest rank must be late to count as late."""
CHANCE: Final = 0.01
"""Probability below which a rank that is late in half of the steps is named by chance."""


@dataclass(frozen=True)
class RankTimes:
    """Seconds of a rank: means per step and per stage by the device clock, and the exposed time of each step."""

    step_s: float
    stages: Mapping[str, float]
    exposed_s: Sequence[float]


def find_straggler(ranks: Sequence[RankTimes]) -> tuple[tuple[RankResult, ...], StragglerResult]:
    """Return a row per rank, and the total loss by waiting; `exposed_s` must be of the same steps on every rank.

    The rank that waits least in a step is the latest, and what another waits more is due to it; no common clock is
    needed. `late_s` of a rank is how much longer the others waited than it did (mean over the others, then over steps),
    `lost_s` how much longer than the rank that waited least: what a step would gain if the latest rank arrived with the
    average of the others. `late_steps` is the share of steps in which some rank was late by 5 % of a step. A rank is
    named if it is the latest by at least 5 % of a step in more steps than chance explains: one-sided sign test at 1 %,
    that is 7 of 7 steps, 22 of 30, 63 of 100.

    `exposed_s` must include waiting for rank 0's buffers before forward; otherwise a late rank 0 seems to wait as long
    as the others. Not detected: lateness inside SyncBatchNorm, and two ranks that alternate within one step. Callers
    leave out steps after a pause of one rank.
    """
    assert len(ranks) > 1, "a rank alone waits for none"
    assert len({len(rank.exposed_s) for rank in ranks}) == 1, "the ranks have counted other steps"
    steps = list(zip(*(rank.exposed_s for rank in ranks), strict=True))
    lateness = [_compute_lateness(exposed_s) for exposed_s in steps]
    late_s = [_mean([step[rank] for step in lateness]) for rank in range(len(ranks))]
    step_s = _mean([rank.step_s for rank in ranks])
    # Means, not medians: a single long stall costs a run its seconds; `late_steps` tells one stall from many.
    lost_s = _mean([max(step) for step in lateness])
    rows = tuple(
        RankResult(rank=number, step_s=rank.step_s, late_s=late_s[number], stages=dict(rank.stages))
        for number, rank in enumerate(ranks)
    )
    enough_s = LATE_SHARE * step_s
    found = StragglerResult(
        lost_s=lost_s,
        share=lost_s / step_s if step_s > 0 else 0.0,
        late_steps=_mean([max(step) >= enough_s > 0 for step in lateness]),
    )
    # Consecutive steps are correlated, which the sign test ignores; the 5 % margin allows for it.
    named = _find_repeatedly_late(lateness, enough_s)
    if named is None:
        return rows, found
    return rows, found.model_copy(
        update={"rank": named, "stage": _find_late_stage(named, ranks), "late_s": late_s[named]}
    )


def _compute_lateness(exposed_s: Sequence[float]) -> list[float]:
    total_s, num_others = sum(exposed_s), len(exposed_s) - 1
    return [(total_s - own_s) / num_others - own_s for own_s in exposed_s]


def _find_repeatedly_late(lateness: Sequence[Sequence[float]], enough_s: float) -> int | None:
    """Return the rank that is the latest, by `enough_s` seconds, in more steps than chance explains."""
    latest = [max(range(len(step)), key=step.__getitem__) for step in lateness if max(step) >= enough_s > 0]
    for rank in set(latest):
        if _binomial_tail(latest.count(rank), len(lateness)) <= CHANCE:
            return rank
    return None


def _binomial_tail(heads: int, tosses: int) -> float:
    """Return the probability that a fair coin shows at least `heads` heads."""
    return sum(comb(tosses, number) for number in range(heads, tosses + 1)) / (1 << tosses)


def _find_late_stage(late: int, ranks: Sequence[RankTimes]) -> str | None:
    def excess_s(stage: str) -> float:
        others = [rank.stages.get(stage, 0.0) for number, rank in enumerate(ranks) if number != late]
        return ranks[late].stages.get(stage, 0.0) - _mean(others)

    stage = max((name for name in ranks[late].stages if name != EXPOSED), key=excess_s, default="")
    return stage if stage and excess_s(stage) > 0 else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def communication_result(
    exposed_s: float, step_s: float, wire_s: float | None = None, buckets: Sequence[BucketResult] = ()
) -> CommunicationResult:
    """Return the result for `exposed_s` of the `step_s` seconds of a step (means).

    `wire_s` is from the first ready bucket to the last averaged one, None if `buckets` were not timed. `overlap`, the
    part hidden by backward, is 1 - exposed_s / wire_s, but at least 0, as `exposed_s` also includes waiting for
    buffers.
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
