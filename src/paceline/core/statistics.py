"""Confidence intervals, and the criterion for reaching a target accuracy.

Intervals of measurements are Student's (1908, doi 10.1093/biomet/6.1.1): measurements are taken as normal, and ratios
of speeds as lognormal. Intervals of counted shares are Wilson's.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from paceline.core.json_file import MeasuredFloat, ResultModel

CONFIDENCE = 0.95
NORMAL_QUANTILE = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
"""97.5 % quantile of the normal distribution."""


class Interval(ResultModel):
    """A mean of `n` measurements with its confidence bounds; None for a single measurement."""

    value: MeasuredFloat
    low: MeasuredFloat | None = None
    high: MeasuredFloat | None = None
    n: int = 1

    def is_above(self, level: float) -> bool:
        """Return whether the whole interval is above `level`; False for a single measurement."""
        return self.low is not None and self.low > level

    def is_below(self, level: float) -> bool:
        """Return whether the whole interval is below `level`; False for a single measurement."""
        return self.high is not None and self.high < level


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of at least one measurement with Student's interval."""
    value, n = fmean(values), len(values)
    if n == 1:  # no variance
        return Interval(value=value)
    half = _t_quantile(n - 1) * math.sqrt(_variance(values) / n)
    return Interval(value=value, low=value - half, high=value + half, n=n)


def resampled_interval(values: Sequence[float], ratio: float) -> Interval:
    """Return the mean of the scores of a cross-validation with the corrected resampled t interval.

    `ratio` is the number of test images over that of training images. Training sets overlap, so the scores are not
    independent: the variance of their mean is 1/n + `ratio` times theirs in place of 1/n (Nadeau and Bengio 2003, doi
    10.1023/A:1024068626366). No estimate of it is unbiased (Bengio and Grandvalet 2004, JMLR 5:1089-1105).
    """
    value, n = fmean(values), len(values)
    if n == 1:  # no variance
        return Interval(value=value)
    half = _t_quantile(n - 1) * math.sqrt(_variance(values) * (1 / n + ratio))
    return Interval(value=value, low=value - half, high=value + half, n=n)


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return the geometric mean of the ratios above/below of paired, positive measurements with Student's interval."""
    # Pairs are measured one after the other, so that other load on the machine affects both and cancels.
    logarithm = mean_interval([math.log(one / other) for one, other in zip(above, below, strict=True)])
    low, high = (None if each is None else math.exp(each) for each in (logarithm.low, logarithm.high))
    return Interval(value=math.exp(logarithm.value), low=low, high=high, n=logarithm.n)


def product_interval(ratios: Sequence[Interval]) -> Interval:
    """Return the product of independent ratios; 1 for none.

    The bounds are None if any ratio has none. `n` is the smallest.
    """
    value = math.prod(each.value for each in ratios)
    n = min((each.n for each in ratios), default=1)
    # Variances add: logarithms of independent ratios have half-widths that add in squares.
    widths = [math.log(each.high / each.value) for each in ratios if each.high is not None]
    if len(widths) < len(ratios) or not ratios:
        return Interval(value=value, n=n)
    half = math.sqrt(math.fsum(width * width for width in widths))
    return Interval(value=value, low=value * math.exp(-half), high=value * math.exp(half), n=n)


def difference_interval(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return mean(above) - mean(below) of independent groups with Welch's interval (1947, doi
    10.1093/biomet/34.1-2.28).

    `n` is that of the smaller group; 1 has no bounds.
    """
    value = fmean(above) - fmean(below)
    n = min(len(above), len(below))
    if n == 1:  # no variance
        return Interval(value=value, n=n)
    errors = [_variance(group) / len(group) for group in (above, below)]
    total = math.fsum(errors)
    if total == 0:
        return Interval(value=value, low=value, high=value, n=n)
    degrees = total**2 / math.fsum(e**2 / (len(g) - 1) for e, g in zip(errors, (above, below), strict=True))
    half = _t_quantile(degrees) * math.sqrt(total)
    return Interval(value=value, low=value - half, high=value + half, n=n)


def wilson_interval(correct: int, total: int) -> Interval:
    """Return the share `correct` / `total` (total >= 1) with Wilson's 95 % interval.

    Wilson 1927, doi 10.1080/01621459.1927.10502953; compared with others by Brown, Cai and DasGupta 2001, doi
    10.1214/ss/1009213286. It holds for other images of the same distribution, not for other training seeds.
    """
    assert 0 <= correct <= total and total > 0, f"{correct} of {total} images"
    z = NORMAL_QUANTILE
    share = correct / total
    middle = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    # At shares of 0 and 1 a bound equals the share; min and max remove its rounding error.
    return Interval(value=share, low=min(share, low), high=max(share, high), n=total)


def _variance(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _t_quantile(degrees: float) -> float:
    """Return the 97.5 % quantile of Student's distribution with `degrees` of freedom."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # importing it takes a tenth of a second

    return float(stdtrit(degrees, 0.5 + CONFIDENCE / 2))


@dataclass(frozen=True)
class Patience:
    """How long a run continues without a better evaluation: a number of `evaluations` or of `steps`; 0 is no limit."""

    evaluations: int = 0
    steps: int = 0

    def is_exhausted(self, evaluations: int, steps: int) -> bool:
        """Return whether the last evaluation was this many `evaluations` and `steps` after the best one, or more."""
        return 0 < self.evaluations <= evaluations or 0 < self.steps <= steps


@dataclass(frozen=True)
class TargetCriterion:
    """A target top-1 accuracy `level`, and the number of consecutive evaluations that must reach it."""

    level: float
    patience: int = 1

    def count(self, hits: int, accuracy: float) -> int:
        """Return the number of consecutive hits after an evaluation of `accuracy`, given `hits` before it."""
        return hits + 1 if accuracy >= self.level else 0

    def is_reached(self, hits: int) -> bool:
        """Return whether `hits` consecutive evaluations are enough."""
        return hits >= self.patience

    def first_reached_at(self, accuracies: Iterable[float]) -> int | None:
        """Return the index of the evaluation that first reached the target, or None."""
        hits = 0
        for index, accuracy in enumerate(accuracies):
            hits = self.count(hits, accuracy)
            if self.is_reached(hits):
                return index
        return None
