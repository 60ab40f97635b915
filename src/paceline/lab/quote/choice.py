"""Choose among plans: the cheapest that ends in time, or the fastest within a budget, in a sentence."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.quote_result import QuotedPlan, Verdict
from paceline.core.statistics import Interval
from paceline.core.units import duration, number

_VERDICTS: Final[tuple[Verdict, ...]] = ("yes", "likely", "unlikely", "no")


@dataclass(frozen=True)
class Limits:
    """Hours and money that a plan may take; None: any. `currency` is that of the prices, "" without any."""

    by_hours: float | None = None
    budget: float | None = None
    currency: str = ""


def choose_plan(plans: Sequence[QuotedPlan], limits: Limits) -> tuple[str, int | None]:
    """Return a sentence that names the best plan, and its index; None if no plan can run.

    A plan is sure to keep a limit if the whole interval does. With a limit of time the cheapest plan is best, of
    GPU-hours without prices; with a budget alone the fastest.
    """
    able = [index for index, plan in enumerate(plans) if plan.fits and math.isfinite(plan.hours.value)]
    if not able:
        reason = "its GPU has too little memory" if not any(plan.fits for plan in plans) else "failures come too often"
        return f"No plan can run: {reason}.", None

    if limits.by_hours is None and limits.budget is None:
        return _describe_ends(plans, able, limits)
    key = _hours if limits.by_hours is None else _cost
    superlative, comparative = ("fastest plan", "is faster") if key is _hours else ("cheapest plan", "is cheaper")
    if not limits.currency:
        superlative, comparative = "plan of the fewest GPU-hours", "takes fewer GPU-hours"
    does = " and ".join(_list_goals(limits, "ends", "costs"))
    by_verdict = {verdict: [each for each in able if _worst(plans[each]) == verdict] for verdict in _VERDICTS}

    def best(verdict: Verdict) -> int:
        return min(by_verdict[verdict], key=lambda index: (key(plans[index]), _hours(plans[index])))

    def describe(index: int) -> str:
        return f"{name_plan(plans[index])}: {_describe_figures(plans[index], limits.currency)}"

    if by_verdict["yes"]:
        chosen = best("yes")
        text = f"The {superlative} that {does} is {describe(chosen)}."
        if by_verdict["likely"] and key(plans[other := best("likely")]) < key(plans[chosen]):
            figures = _describe_figures(plans[other], limits.currency)
            text += f" {name_plan(plans[other])} {comparative}, and likely {does} too: {figures}."
        return text, chosen
    if by_verdict["likely"]:
        chosen = best("likely")
        return f"No plan surely {does}. The {superlative} that likely {does} is {describe(chosen)}.", chosen
    chosen = min(able, key=lambda index: _excess(plans[index], limits))
    missed = " and ".join(_list_goals(limits, "end", "cost"))
    nearest = f"{name_plan(plans[chosen])} comes nearest: {_describe_figures(plans[chosen], limits.currency)}"
    return f"No plan is likely to {missed}. {nearest}.", chosen


def _describe_figures(plan: QuotedPlan, currency: str) -> str:
    """Return `9 h 05 min (8 h 10 min to 10 h 20 min) for USD 210 (190 to 240)`."""
    figures = _format_interval(plan.hours, lambda hours: duration(3600 * hours))
    return figures if plan.cost is None else f"{figures} for {currency} {_format_interval(plan.cost, number)}"


def name_plan(plan: QuotedPlan) -> str:
    """Return `8 x h100 on spot`."""
    return f"{plan.ranks:,} x {plan.gpu}" + (" on spot" if plan.pricing == "spot" else "")


def _describe_ends(plans: Sequence[QuotedPlan], able: Sequence[int], limits: Limits) -> tuple[str, int]:
    """Return a sentence on the cheapest and the fastest plan, and the index of the one that it names first."""

    def describe(index: int) -> str:
        return f"{name_plan(plans[index])}: {_describe_figures(plans[index], limits.currency)}"

    fastest = min(able, key=lambda index: (_hours(plans[index]), _cost(plans[index])))
    if not limits.currency:
        return f"The fastest plan is {describe(fastest)}.", fastest
    cheapest = min(able, key=lambda index: (_cost(plans[index]), _hours(plans[index])))
    if cheapest == fastest:
        return f"The cheapest plan, and the fastest, is {describe(cheapest)}.", cheapest
    return f"The cheapest plan is {describe(cheapest)}. The fastest is {describe(fastest)}.", cheapest


def _format_interval(interval: Interval, write: Callable[[float], str]) -> str:
    if interval.low is None or interval.high is None or not math.isfinite(interval.high):
        return write(interval.value)
    return f"{write(interval.value)} ({write(interval.low)} to {write(interval.high)})"


def _list_goals(limits: Limits, ends: str, costs: str) -> list[str]:
    goals = []
    if limits.by_hours is not None:
        goals.append(f"{ends} within {number(limits.by_hours)} h")
    if limits.budget is not None:
        goals.append(f"{costs} at most {limits.currency} {number(limits.budget)}")
    return goals


def _worst(plan: QuotedPlan) -> Verdict:
    set_ones = [each for each in (plan.ends_in_time, plan.is_within_budget) if each]
    return max(set_ones, key=_VERDICTS.index)


def _hours(plan: QuotedPlan) -> float:
    return plan.hours.value


def _cost(plan: QuotedPlan) -> float:
    """Return the cost, or the GPU-hours without a price."""
    return plan.ranks * plan.hours.value if plan.cost is None else plan.cost.value


def _excess(plan: QuotedPlan, limits: Limits) -> float:
    """Return how far the plan is beyond the limit that it misses most, as a ratio."""
    ratios = [plan.hours.value / limits.by_hours] if limits.by_hours else []
    ratios += [plan.cost.value / limits.budget] if limits.budget and plan.cost is not None else []
    return max(ratios)
