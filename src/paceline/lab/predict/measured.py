"""What an all-reduce was measured to take, of several sizes, and the link that explains it. Torch-free.

It does not measure: `measure.collective` does, on ranks.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError

from paceline.core.errors import RecipeError
from paceline.core.value import Value

_QUANTILE: Final = 1.96


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
    nothing else; neither is negative. At least two ranks and two sizes.
    """
    assert ranks > 1 and len({each.bytes for each in times}) > 1, "a line needs two ranks and two sizes"
    fixed_s, per_byte_s, error = _line([(each.bytes, each.median_s) for each in times])
    bandwidth = 2 * (ranks - 1) / ranks / per_byte_s
    doubt = _QUANTILE * error / per_byte_s
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


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Return a and b of T = a + b x by least squares of (a + b x) / T - 1, and the standard error of b."""
    weights = [1 / seconds for _, seconds in points]
    ones = weights
    slopes = [weight * num_bytes for weight, (num_bytes, _) in zip(weights, points, strict=True)]
    aa = math.fsum(each * each for each in ones)
    ab = math.fsum(one * slope for one, slope in zip(ones, slopes, strict=True))
    bb = math.fsum(each * each for each in slopes)
    a1, b1 = math.fsum(ones), math.fsum(slopes)
    determinant = aa * bb - ab * ab
    fixed, per_byte = (a1 * bb - b1 * ab) / determinant, (aa * b1 - ab * a1) / determinant
    if fixed < 0 or per_byte <= 0:  # on the border the other one alone is the best
        fixed, per_byte = 0.0, b1 / bb
    left = math.fsum((fixed * one + per_byte * slope - 1) ** 2 for one, slope in zip(ones, slopes, strict=True))
    freedom = max(1, len(points) - 2)
    return fixed, per_byte, math.sqrt(left / freedom * aa / determinant)
