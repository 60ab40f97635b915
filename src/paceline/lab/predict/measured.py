"""Measured all-reduces, and the link that explains them. Torch-free; `measure.collective` does the timing."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Final, Literal

from pydantic import Field, ValidationError

from paceline.core.errors import RecipeError
from paceline.core.value import ResultModel

_QUANTILE: Final = 0.975
_P10_TO_P90_SIGMAS: Final = NormalDist().inv_cdf(0.9) - NormalDist().inv_cdf(0.1)
"""Standard deviations between the 10th and 90th percentile of a normal distribution."""


class AllReduceTiming(ResultModel):
    """An all-reduce of `bytes`, timed `n` times: median, 10th and 90th percentile of the slowest rank's seconds."""

    bytes: int
    median_s: float = Field(gt=0)
    p10_s: float
    p90_s: float
    n: int


class AllReduceMeasurement(ResultModel):
    """All-reduces of several sizes on `ranks` ranks of `nodes` nodes, and the fitted link between ranks.

    `alpha_s` is seconds per hop of a ring. `bytes_per_s` is the bus bandwidth as in nccl-tests: bytes a rank sends in a
    ring, 2 (N - 1) / N of the buffer, per second; `low` and `high` bound it with 95 % confidence.
    """

    kind: Literal["collective"] = "collective"
    schema_version: int = 1
    backend: str
    ranks: int
    nodes: int
    times: tuple[AllReduceTiming, ...]
    alpha_s: float
    bytes_per_s: float
    low: float
    high: float
    source: str = "measured"


def fit_link(backend: str, ranks: int, nodes: int, times: Sequence[AllReduceTiming]) -> AllReduceMeasurement:
    """Fit a ring: T = 2 (N - 1) alpha + 2 (N - 1) / N bytes / bandwidth; at least two ranks and two sizes.

    Hockney's model of a message (1994, doi 10.1016/S0167-8191(06)80021-9) for each hop of a ring (Patarasuk and Yuan
    2009, doi 10.1016/j.jpdc.2008.09.002), by non-negative least squares of relative errors. The interval of the
    bandwidth combines Student's interval of the residuals and the scatter of each size, added in squares.
    """
    assert ranks > 1 and len({each.bytes for each in times}) > 1, "a line needs two ranks and two sizes"
    # Absolute errors would ignore small messages. Two sizes leave no residuals, so the scatter alone counts then.
    fixed_s, per_byte_s, error_s = _fit_line(times)
    bandwidth = 2 * (ranks - 1) / ranks / per_byte_s
    doubt = error_s / per_byte_s
    return AllReduceMeasurement(
        backend=backend,
        ranks=ranks,
        nodes=nodes,
        times=tuple(times),
        alpha_s=fixed_s / (2 * (ranks - 1)),
        bytes_per_s=bandwidth,
        low=bandwidth / (1 + doubt),
        high=bandwidth * (1 + doubt),
    )


def read_all_reduce_file(path: Path) -> AllReduceMeasurement:
    """Read the output of `paceline scale --collective`. Raise `RecipeError` if it is invalid."""
    try:
        return AllReduceMeasurement.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RecipeError(f"--network: {path}: cannot be read: {error.strerror} (name another file)") from None
    except (ValidationError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        fix = "write one with `paceline scale --collective`"
        raise RecipeError(f"--network: {path}: is not a measured collective: {reason} ({fix})") from None


def _fit_line(times: Sequence[AllReduceTiming]) -> tuple[float, float, float]:
    """Return a and b of T = a + b x by least squares of (a + b x) / T - 1, and the 95 % error of b."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # loading it takes a tenth of a second

    ones = [1 / each.median_s for each in times]
    slopes = [each.bytes / each.median_s for each in times]
    aa, bb = (math.fsum(each * each for each in weights) for weights in (ones, slopes))
    ab = math.fsum(one * slope for one, slope in zip(ones, slopes, strict=True))
    determinant = aa * bb - ab * ab
    # Influence of each size on b, which is linear in T, relative to its own time.
    influence = [(aa * slope - ab * one) / determinant for one, slope in zip(ones, slopes, strict=True)]
    fixed = (math.fsum(ones) * bb - math.fsum(slopes) * ab) / determinant
    variance, freedom = aa / determinant, len(times) - 2
    if fixed < 0 or math.fsum(influence) <= 0:  # at the bound a = 0 the best fit is b alone
        fixed, influence, variance, freedom = 0.0, [slope / bb for slope in slopes], 1 / bb, len(times) - 1
    per_byte = math.fsum(influence)
    residual = math.fsum((fixed * one + per_byte * slope - 1) ** 2 for one, slope in zip(ones, slopes, strict=True))
    residual_error = float(stdtrit(freedom, _QUANTILE)) * math.sqrt(residual / freedom * variance) if freedom else 0.0
    relative_scatter = [(each.p90_s - each.p10_s) / _P10_TO_P90_SIGMAS / each.median_s for each in times]
    scatter = NormalDist().inv_cdf(_QUANTILE) * math.hypot(
        *(a * b for a, b in zip(influence, relative_scatter, strict=True))
    )
    return fixed, per_byte, math.hypot(residual_error, scatter)
