"""Format speedups."""

from paceline.core.interval import Interval


def format_speedup(ratio: Interval, digits: int = 2, word: str = "x") -> str:
    """Return a speedup such as `1.62x (1.32 to 2.00)`, or `1.62x` without an interval."""
    bounds = ""
    if ratio.low is not None and ratio.high is not None:
        bounds = f" ({ratio.low:.{digits}f} to {ratio.high:.{digits}f})"
    return f"{ratio.value:.{digits}f}{word}{bounds}"
