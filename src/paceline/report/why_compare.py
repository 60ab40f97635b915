"""Compare two runs for `paceline why`. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Final, Literal

from paceline import __version__
from paceline.core.errors import RecipeError
from paceline.core.statistics import NORMAL_QUANTILE, Interval, difference_interval
from paceline.core.units import share
from paceline.core.why_result import Cause, Difference, OutcomeGap, PartGap, SpeedGap, Verdict, WhyResult
from paceline.report.why_causes import LOAD, rank_outcome_causes, rank_speed_causes
from paceline.report.why_sides import Side, final_metric

_RUN_SPREAD: Final = 0.05
"""Share by which two runs of one setting may differ as a whole, which the steps of one run do not show."""
_LOSS_SPREAD: Final = 0.01
"""The same for the mean of the last losses."""
_MIN_LOST: Final = 0.05
"""Change of the share of time that other processes took from which it counts as a difference."""
_NUM_BLOCKS: Final = 10
_IGNORED: Final = ("machine.load",)


def compare_sides(a: Side, b: Side) -> WhyResult:
    """Return why `b` is slower or ends worse than `a`. Raise `RecipeError` if they are of different kinds."""
    if a.kind != b.kind:
        raise RecipeError(f"why: {b.path} is a {b.kind}, and {a.path} a {a.kind} (name two of one kind)")
    differences = find_differences(a, b)
    speed = _compare_speed(a, b)
    causes: list[Cause] = []
    if speed.verdict in ("slower", "faster"):
        parts_a, parts_b = ({each.name: getattr(each, field) for each in speed.parts} for field in ("a_s", "b_s"))
        has_gpu = any(name in side.settings for side in (a, b) for name in ("machine.gpu", "machine.gpus"))
        causes = list(rank_speed_causes(differences, parts_a, parts_b, load_factor=_load_factor(a, b), has_gpu=has_gpu))
    outcome = _compare_outcome(a, b)
    outcome_causes: list[Cause] = []
    if outcome is not None and outcome.verdict in ("worse", "better"):
        outcome_causes = list(
            rank_outcome_causes(
                differences,
                is_better=outcome.verdict == "better",
                first_step=outcome.first_step,
                knows_first=1 in a.losses and 1 in b.losses,
            )
        )
    named = {each.difference.name for each in (*causes, *outcome_causes)}
    return WhyResult(
        paceline=__version__,
        a=str(a.path),
        b=str(b.path),
        speed=speed,
        causes=tuple(causes),
        outcome=outcome,
        outcome_causes=tuple(outcome_causes),
        also_different=tuple(each for each in differences if each.name not in named),
        notes=tuple(_find_notes(a, b, speed)),
    )


def find_differences(a: Side, b: Side) -> list[Difference]:
    """Return all recorded facts in which both differ, in the order of `a`."""
    names = dict.fromkeys((*a.settings, *b.settings))
    found = [
        Difference(name=name, a=a.settings.get(name), b=b.settings.get(name))
        for name in names
        if a.settings.get(name) != b.settings.get(name) and name not in _IGNORED
    ]
    if a.lost_share is not None and b.lost_share is not None and abs(a.lost_share - b.lost_share) >= _MIN_LOST:
        found.append(Difference(name=LOAD, a=share(a.lost_share), b=share(b.lost_share)))
    return found


def _compare_speed(a: Side, b: Side) -> SpeedGap:
    unit: Literal["sample", "step"] = "step"
    per_a = per_b = 1.0
    if a.samples and b.samples and not math.isclose(a.samples, b.samples, rel_tol=0.01):
        unit, per_a, per_b = "sample", a.samples, b.samples
    parts_a, parts_b = ({**each.stages, **each.pauses} for each in (a, b))
    gaps = {
        name: parts_b.get(name, 0.0) / per_b - parts_a.get(name, 0.0) / per_a
        for name in dict.fromkeys((*parts_a, *parts_b))
    }
    cost_a, cost_b = a.step_s / per_a, b.step_s / per_b
    gap_s = cost_b - cost_a
    blocks_a, blocks_b = ([each / per for each in _to_blocks(side.blocks)] for side, per in ((a, per_a), (b, per_b)))
    half_s = _half_width(blocks_a, blocks_b)
    low, high = (None, None) if half_s is None else (cost_b - half_s, cost_b + half_s)
    ratio = Interval(
        value=cost_b / cost_a,
        low=None if low is None else low / cost_a,
        high=None if high is None else high / cost_a,
        n=min(len(blocks_a), len(blocks_b)) or 1,
    )
    verdict: Verdict = "slower" if gap_s > 0 else "faster"
    if abs(gap_s) <= max(half_s or 0.0, _RUN_SPREAD * cost_a):
        verdict = "same"
    parts = [
        PartGap(
            name=name,
            a_s=parts_a.get(name, 0.0) / per_a,
            b_s=parts_b.get(name, 0.0) / per_b,
            share=each / gap_s if gap_s else 0.0,
        )
        for name, each in sorted(gaps.items(), key=lambda each: -abs(each[1]))
    ]
    return SpeedGap(verdict=verdict, unit=unit, a_s=cost_a, b_s=cost_b, ratio=ratio, parts=tuple(parts))


def _to_blocks(values: Sequence[float]) -> list[float]:
    """Return the means of up to ten blocks of consecutive values: neighbors are not independent."""
    size = -(-len(values) // _NUM_BLOCKS) or 1
    return [fmean(values[begin : begin + size]) for begin in range(0, len(values), size)]


def _half_width(a: Sequence[float], b: Sequence[float]) -> float | None:
    if not a or not b:
        return None
    found = difference_interval(b, a)
    return None if found.high is None else found.high - found.value


def _load_factor(a: Side, b: Side) -> float | None:
    """Return the time of `b` over that of `a` as far as the time lost to other processes explains it."""
    if a.lost_share is None or b.lost_share is None:
        return None
    return max(1e-3, 1 - a.lost_share) / max(1e-3, 1 - b.lost_share)


def _compare_outcome(a: Side, b: Side) -> OutcomeGap | None:
    found = final_metric(a, b)
    if found is None:
        return None
    metric, value_a, value_b = found
    gap = value_b - value_a
    half = _outcome_half_width(a, b, metric)
    verdict: Literal["worse", "better", "same", "unknown"] = "unknown"
    if math.isfinite(gap):
        is_better = gap > 0 if metric == "top1" else gap < 0
        least = half if metric == "top1" else max(half, _LOSS_SPREAD * abs(value_a))
        verdict = "same" if abs(gap) <= least else "better" if is_better else "worse"
    elif math.isfinite(value_a):
        verdict = "worse"
    elif math.isfinite(value_b):
        verdict = "better"
    interval = Interval(value=gap, low=gap - half, high=gap + half) if half else Interval(value=gap)
    return OutcomeGap(
        verdict=verdict, metric=metric, a=value_a, b=value_b, gap=interval, first_step=_first_step(a.losses, b.losses)
    )


def _outcome_half_width(a: Side, b: Side, metric: str) -> float:
    ours, theirs = a.evaluation, b.evaluation
    if metric == "top1" and ours is not None and theirs is not None:
        variance = sum(each.top1 * (1 - each.top1) / max(1, each.images) for each in (ours, theirs))
        return NORMAL_QUANTILE * math.sqrt(variance)
    if ours is not None and theirs is not None:
        return 0.0
    return _half_width(a.last_losses, b.last_losses) or 0.0


def _first_step(a: Mapping[int, float], b: Mapping[int, float]) -> int | None:
    for step in sorted(a.keys() & b.keys()):
        if a[step] != b[step] and not (math.isnan(a[step]) and math.isnan(b[step])):
            return step
    return None


def _find_notes(a: Side, b: Side, speed: SpeedGap) -> Iterator[str]:
    for side in (a, b):
        if side.lost_share is not None and side.lost_share >= _MIN_LOST:
            yield (
                f"{side.path.name}: other processes held the cores for {share(side.lost_share)} of the time that it "
                "could have run. Repeat it on a quiet machine."
            )
    if speed.ratio.low is None:
        yield "There are too few records of steps for an interval of their time."
