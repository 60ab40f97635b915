"""Recommend a checkpoint interval from costs (pure).

The optimum is flat: at half or twice the best interval, saves and repeated steps cost a quarter more. So paceline
recommends a range, and a round value in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.core.goodput import best_interval, efficiency, interval_steps, signal_lead, young_interval

_ROUND_TIMES: Final = (
    *((seconds, f"{seconds}s") for seconds in (1, 2, 3, 5, 10, 15, 20, 30)),
    *((60 * minutes, f"{minutes}min") for minutes in (1, 2, 3, 5, 10, 15, 20, 30)),
    *((3600 * hours, f"{hours}h") for hours in (1, 2, 3, 4, 6, 8, 12, 24)),
)
_MIN_GAIN: Final = 0.001
"""Share of wall-clock time below which a better interval is not worth mentioning."""


@dataclass(frozen=True)
class SavingCosts:
    """Costs of saving and restarting, in seconds, and the current interval; None if unknown.

    `stall_s`, `write_s` and `restart_s` are as in `core.goodput`; `step_s` is a typical step, `slow_s` a slow one,
    `every_s` the time between checkpoints.
    """

    stall_s: float
    write_s: float
    restart_s: float
    step_s: float | None = None
    every_s: float | None = None
    slow_s: float | None = None


def advise_interval(costs: SavingCosts, mtbf_s: float) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """Return values for JSON and rows for a table, for failures `mtbf_s` apart."""
    best_s = best_interval(costs.stall_s, costs.write_s, mtbf_s)
    step_s = costs.step_s
    steps = interval_steps(best_s, step_s) if step_s is not None else None
    if steps is not None and step_s is not None:
        best_s = steps * step_s
    low_s, high_s = max(best_s / 2, costs.write_s), 2 * best_s
    shares = {each: _useful_share(costs, each, mtbf_s) for each in (best_s, low_s, high_s)}
    setting = _round_setting(best_s, low_s, high_s, steps)
    in_steps = f", {steps:,} steps" if steps is not None else ""
    rows: list[tuple[str, ...]] = [
        ("failures", f"assumed {approximate_time(mtbf_s)} apart"),
        (
            "best",
            f"every {approximate_time(best_s)}{in_steps}: loses {1 - shares[best_s]:.2%}, restarts included (Daly 2006)",
        ),
        (
            "as good",
            f"{approximate_time(low_s)} to {approximate_time(high_s)}: lose {1 - shares[low_s]:.2%} and {1 - shares[high_s]:.2%}, "
            f"such as checkpoint.every={setting}",
        ),
    ]
    values: dict[str, Any] = {
        "mtbf_s": mtbf_s,
        "young_s": young_interval(costs.stall_s, mtbf_s),
        "best_s": best_s,
        "best_steps": steps,
        "best_cost": 1 - shares[best_s],
        "range_s": [low_s, high_s],
        "setting": f"checkpoint.every={setting}",
        "now_s": costs.every_s,
    }
    if costs.every_s is not None:
        values["now_cost"] = 1 - _useful_share(costs, costs.every_s, mtbf_s)
        values["worst_loss_s"] = costs.every_s + costs.write_s
        rows += _current_rows(costs, values["now_cost"], values["best_cost"])
    slow_s = costs.slow_s if costs.slow_s is not None else 0.0
    values["signal_lead_s"] = signal_lead(slow_s, costs.stall_s + costs.write_s)
    rows.append(("lead time", f"{values['signal_lead_s']:.0f} s of warning before a job ends (sbatch --signal)"))
    return values, rows


def approximate_time(seconds: float) -> str:
    """Return a duration with the precision of an estimate: `40 s`, `12 min`, `7.9 h`, `40 days`."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    for limit, unit_s, unit in ((100, 1, "s"), (100 * 60, 60, "min"), (72 * 3600, 3600, "h")):
        if seconds < limit:
            value = seconds / unit_s
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"
    return f"{seconds / 86400:,.0f} days"


def _current_rows(costs: SavingCosts, now: float, best: float) -> Sequence[tuple[str, ...]]:
    assert costs.every_s is not None
    verdict = f"{now - best:.2%} more than the best" if now - best >= _MIN_GAIN else "as good as the best"
    return (
        ("now", f"you save every {approximate_time(costs.every_s)}: loses {now:.2%}, {verdict}"),
        ("worst case", f"a kill loses up to {approximate_time(costs.every_s + costs.write_s)} of training"),
    )


def _useful_share(costs: SavingCosts, work_s: float, mtbf_s: float) -> float:
    return efficiency(work_s, costs.stall_s, costs.restart_s, mtbf_s, write_s=costs.write_s)


def _round_setting(best_s: float, low_s: float, high_s: float, steps: int | None) -> str:
    """Return the round duration closest to the best by ratio, or `steps` if none is in the range."""
    inside = [each for each in _ROUND_TIMES if low_s <= each[0] <= high_s]
    if not inside and steps is not None:
        return f"{steps}st"
    return min(inside or _ROUND_TIMES, key=lambda each: max(each[0] / best_s, best_s / each[0]))[1]
