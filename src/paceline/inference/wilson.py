"""The interval of a share that was counted. Pure."""

import math
from statistics import NormalDist

from paceline.core.interval import CONFIDENCE, Interval


def wilson(correct: int, total: int) -> Interval:
    """Return `correct` of `total`, at least 1, with the interval in which the share lies with 95 % confidence.

    Wilson 1927, doi 10.1080/01621459.1927.10502953; Brown, Cai and DasGupta 2001, doi 10.1214/ss/1009213286, compare
    it with others. It is of other images drawn as these were, and says nothing of training again with another seed.
    """
    assert 0 <= correct <= total and total > 0, f"{correct} of {total} images"
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    share = correct / total
    middle = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return Interval(value=share, low=min(share, low), high=max(share, high), n=total)  # at 0 and 1 but for rounding
