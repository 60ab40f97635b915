"""What an all-reduce was measured to take, of several sizes, and the link that explains it. Torch-free.

It does not measure: `measure.collective` does, on ranks.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Final, Literal

from pydantic import Field, ValidationError

from paceline.core.errors import RecipeError
from paceline.core.value import Value

_QUANTILE: Final = 0.975
_TENTHS: Final = NormalDist().inv_cdf(0.9) - NormalDist().inv_cdf(0.1)
"""Standard deviations between the 10th and the 90th percentile of what scatters normally."""


class TimedReduce(Value):
    """An all-reduce of `bytes`, timed `n` times on all ranks: the median of the slowest rank's seconds, and the range.

    The range is the 10th and 90th percentile.
    """

    bytes: int
    median_s: float = Field(gt=0)
    p10_s: float
    p90_s: float
    n: int


class Measured(Value):
    """All-reduces of several sizes on `ranks` ranks of `nodes` nodes, and what they say of the link between ranks.

    `alpha_s` are seconds a hop of a ring, `bytes_per_s` the bus bandwidth, as nccl-tests defines it: bytes a rank sends
    in a ring, 2 (N - 1) / N of what is averaged, by the seconds; `low` and `high` bound it with 95 % confidence.
    """

    kind: Literal["collective"] = "collective"
    schema_version: int = 1
    backend: str
    ranks: int
    nodes: int
    times: tuple[TimedReduce, ...]
    alpha_s: float
    bytes_per_s: float
    low: float
    high: float
    source: str = "measured"


def fit(backend: str, ranks: int, nodes: int, times: Sequence[TimedReduce]) -> Measured:
    """Return the ring that explains the times best: T = 2 (N - 1) alpha + 2 (N - 1) / N bytes / bandwidth.

    That is Hockney's model of a message (1994, doi 10.1016/S0167-8191(06)80021-9) for each hop of a ring (Patarasuk and
    Yuan 2009, doi 10.1016/j.jpdc.2008.09.002). Least squares in relative errors, as small messages would count for
    nothing else; neither is negative. The bandwidth's interval is Student's of what the line leaves over, and what each
    size itself scatters by, added in squares: where two sizes leave nothing over, that is all that is known. At least
    two ranks and two sizes.
    """
    assert ranks > 1 and len({each.bytes for each in times}) > 1, "a line needs two ranks and two sizes"
    fixed_s, per_byte_s, error_s = _line(times)
    bandwidth = 2 * (ranks - 1) / ranks / per_byte_s
    doubt = error_s / per_byte_s
    return Measured(
        backend=backend,
        ranks=ranks,
        nodes=nodes,
        times=tuple(times),
        alpha_s=fixed_s / (2 * (ranks - 1)),
        bytes_per_s=bandwidth,
        low=bandwidth / (1 + doubt),
        high=bandwidth * (1 + doubt),
    )


def read_collective(path: Path) -> Measured:
    """Return what `paceline scale --collective` wrote. Raise `RecipeError` where that cannot be read."""
    try:
        return Measured.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RecipeError(f"--network: {path}: cannot be read: {error.strerror} (name another file)") from None
    except (ValidationError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        fix = "write one with `paceline scale --collective`"
        raise RecipeError(f"--network: {path}: is no measured collective: {reason} ({fix})") from None


def _line(times: Sequence[TimedReduce]) -> tuple[float, float, float]:
    """Return a and b of T = a + b x by least squares of (a + b x) / T - 1, and how far b may be off (95 %)."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # loading it takes a tenth of a second

    ones = [1 / each.median_s for each in times]
    slopes = [each.bytes / each.median_s for each in times]
    aa, bb = (math.fsum(each * each for each in weights) for weights in (ones, slopes))
    ab = math.fsum(one * slope for one, slope in zip(ones, slopes, strict=True))
    determinant = aa * bb - ab * ab
    # How much each size has to say of b, where b is linear in T: over its own time.
    said = [(aa * slope - ab * one) / determinant for one, slope in zip(ones, slopes, strict=True)]
    fixed = (math.fsum(ones) * bb - math.fsum(slopes) * ab) / determinant
    variance, freedom = aa / determinant, len(times) - 2
    if fixed < 0 or math.fsum(said) <= 0:  # on the border b alone is the best
        fixed, said, variance, freedom = 0.0, [slope / bb for slope in slopes], 1 / bb, len(times) - 1
    per_byte = math.fsum(said)
    left = math.fsum((fixed * one + per_byte * slope - 1) ** 2 for one, slope in zip(ones, slopes, strict=True))
    over = float(stdtrit(freedom, _QUANTILE)) * math.sqrt(left / freedom * variance) if freedom else 0.0
    own = [(each.p90_s - each.p10_s) / _TENTHS / each.median_s for each in times]
    scatter = NormalDist().inv_cdf(_QUANTILE) * math.hypot(*(a * b for a, b in zip(said, own, strict=True)))
    return fixed, per_byte, math.hypot(over, scatter)
