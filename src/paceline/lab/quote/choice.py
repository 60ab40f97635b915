"""Choose among plans: the cheapest that ends in time, or the fastest within a budget, in a sentence."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.quote_result import VERDICTS, QuotedPlan, Verdict, format_hours, format_limits, format_range
from paceline.core.statistics import Interval
from paceline.core.units import count, number


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
        return f"No plan can run: {_explain_none(plans)}.", None

    if limits.by_hours is None and limits.budget is None:
        return _describe_ends(plans, able, limits)
    key = _hours if limits.by_hours is None else _cost
    superlative, comparative = ("fastest plan", "is faster") if key is _hours else ("cheapest plan", "is cheaper")
    if not limits.currency:
        superlative, comparative = "plan of the fewest GPU-hours", "takes fewer GPU-hours"
    does = " and ".join(_list_goals(limits, "ends", "costs"))
    by_verdict = {verdict: [each for each in able if _worst(plans[each]) == verdict] for verdict in VERDICTS}

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


def _explain_none(plans: Sequence[QuotedPlan]) -> str:
    """Return why none of the plans can run, with the fix for each reason."""
    too_large = [plan for plan in plans if not plan.fits]
    reasons = []
    if too_large:
        largest = max(plan.largest_micro_batch for plan in too_large)
        fix = (
            f"the largest micro-batch is {count(largest, 'image')}: set train.accumulate"
            if largest
            else "add larger GPUs"
        )
        reasons.append(f"{count(len(too_large), 'plan needs', 'plans need')} more memory than their GPUs have ({fix})")
    if endless := len(plans) - len(too_large):
        fix = "set a shorter checkpoint.every, or use fewer nodes"
        reasons.append(f"failures leave {count(endless, 'plan')} too little time to train ({fix})")
    return ", and ".join(reasons)


def _describe_figures(plan: QuotedPlan, currency: str) -> str:
    """Return `9 h 05 min (8 h 10 min to 10 h 20 min) for USD 210 (190 to 240)`."""
    figures = _format_interval(plan.hours, format_hours)
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
    bounds = format_range(interval, write)
    return f"{write(interval.value)} ({bounds})" if bounds else write(interval.value)


def _list_goals(limits: Limits, ends: str, costs: str) -> list[str]:
    time, budget = format_limits(limits.by_hours, limits.budget, limits.currency)
    return [*([f"{ends} within {time}"] if time else []), *([f"{costs} at most {budget}"] if budget else [])]


def _worst(plan: QuotedPlan) -> Verdict:
    set_ones = [each for each in (plan.ends_in_time, plan.is_within_budget) if each]
    return max(set_ones, key=VERDICTS.index)


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
