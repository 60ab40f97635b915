"""Build the page of `paceline quote`: the answer, the plans, cost over time, assumptions and the command."""

import math
from collections.abc import Sequence
from typing import Final

from paceline.core.quote_result import PARTS, QuotedPlan, QuoteResult, Verdict
from paceline.core.statistics import Interval
from paceline.core.units import count, duration, number, per_second, size
from paceline.report import cells
from paceline.report.document import (
    Block,
    Chart,
    ChartLine,
    ChartRow,
    KeyFigure,
    KeyValueList,
    PageSection,
    Paragraph,
    ReportPage,
    Table,
    TableCell,
    Tone,
)
from paceline.report.experiment_common import MAX_OPEN_ROWS, shell_command
from paceline.report.series import Point
from paceline.report.text import clean_text

_CANNOT_KNOW: Final = (
    "A quote is computed from datasheets and from measurements of other networks. It cannot know the CPU that launches "
    "the kernels, the cooling of the GPU, other programs on the node, or the version of the libraries. Rent one GPU for "
    "a few minutes, and train with log.quote before you rent eight: the run says how far off the quote was."
)
_VERDICT_TEXTS: Final[dict[Verdict, str]] = {verdict: verdict for verdict in ("yes", "likely", "unlikely", "no")}


def build_quote_page(result: QuoteResult) -> ReportPage:
    """Return the page; a terminal shows the answer, the plans and the notes."""
    answer = Paragraph(clean_text(result.answer, 1000))
    plans = _plans_table(result)
    notes: list[Block] = [Paragraph(f"note: {clean_text(each, 600)}") for each in result.notes]
    facts = [(clean_text(name, 60), cells.text_cell(text, 300)) for name, text in result.assumptions.items()]
    assumed = KeyValueList(facts, "Assumed")
    sections = [
        PageSection("answer", "Answer", [answer, *_chart_blocks(result)]),
        PageSection("plans", "Plans", [Paragraph(_describe_table(result)), plans, _parts_table(result)]),
        PageSection("assumptions", "Assumptions", [assumed, *notes]),
        PageSection("limits", "What it cannot know", [Paragraph(_CANNOT_KNOW)]),
        PageSection("origin", "Repeat it", [shell_command(result.command)]),
    ]
    status, tone = _describe_status(result)
    return ReportPage(
        title=f"Quote for {clean_text(result.recipe, 80)}",
        subtitle=[clean_text(result.assumptions.get("length", ""), 120), *_describe_prices(result)],
        status=status,
        tone=tone,
        figures=_list_figures(result),
        verdict=None,
        notices=(),
        problems=(),
        sections=sections,
        paceline=clean_text(result.paceline),
        about="Quote",
        source="datasheets of GPUs and a fitted model of their kernels. Nothing was trained",
        summary=[answer, plans, assumed, *notes],
    )


def _describe_prices(result: QuoteResult) -> list[str]:
    return [f"prices of {clean_text(result.prices_date, 40)}"] if result.prices_date else []


def _describe_status(result: QuoteResult) -> tuple[str, Tone]:
    plan = _chosen_plan(result)
    if plan is None:
        return "no plan can run", "bad"
    verdicts = {plan.ends_in_time, plan.is_within_budget} - {""}
    if not verdicts:
        return count(len(result.plans), "plan"), "good"
    if verdicts == {"yes"}:
        return "a plan keeps the limit", "good"
    is_likely = verdicts <= {"yes", "likely"}
    return ("a plan likely keeps the limit", "warning") if is_likely else ("no plan keeps the limit", "bad")


def _chosen_plan(result: QuoteResult) -> QuotedPlan | None:
    return None if result.chosen is None else result.plans[result.chosen]


def _name(plan: QuotedPlan) -> str:
    return clean_text(f"{plan.ranks:,} x {plan.gpu}{' on spot' if plan.pricing == 'spot' else ''}", 60)


def _list_figures(result: QuoteResult) -> list[KeyFigure]:
    plan = _chosen_plan(result)
    if plan is None:
        return []
    figures = [KeyFigure("time", _time_cell(plan.hours), f"{_range(plan.hours)}, {_name(plan)}")]
    if plan.cost is not None:
        costs = f"{number(plan.cost.low or 0.0)} to {number(plan.cost.high or 0.0)}"
        figures.append(KeyFigure(f"cost, {clean_text(result.currency, 10)}", cells.number_cell(plan.cost.value), costs))
    speed = plan.images_per_s
    speeds = f"{per_second(speed.low or 0.0)} to {per_second(speed.high or 0.0)}"
    return [*figures, KeyFigure("images/s", cells.rate_cell(speed.value), speeds)]


def _duration(hours: float | None) -> str:
    return "never" if hours is None or not math.isfinite(hours) else duration(3600 * hours)


def _range(hours: Interval) -> str:
    return f"{_duration(hours.low)} to {_duration(hours.high)}"


def _time_cell(hours: Interval) -> TableCell:
    return TableCell(_duration(hours.value), hours.value)


def _plans_table(result: QuoteResult) -> Table:
    plans, currency = result.plans, clean_text(result.currency, 10)
    has_spot = any(plan.pricing == "spot" for plan in plans)
    limits = [f"within {number(result.by_hours)} h"] if result.by_hours is not None else []
    limits += [f"for {currency} {number(result.budget)}"] if result.budget is not None else []
    rows = []
    for index, plan in enumerate(plans):
        row = [TableCell(clean_text(plan.gpu, 60)), TableCell(f"{plan.ranks:,}", plan.ranks)]
        row += [TableCell(plan.pricing)] if has_spot else []
        row += [
            cells.rate_cell(plan.images_per_s),
            TableCell(_duration(plan.hours.value), plan.hours.value, note=_range(plan.hours)),
        ]
        row += [cells.number_cell(plan.cost)] if currency else []
        row += [TableCell(_VERDICT_TEXTS.get(plan.ends_in_time, ""))] if result.by_hours is not None else []
        row += [TableCell(_VERDICT_TEXTS.get(plan.is_within_budget, ""))] if result.budget is not None else []
        row += [
            TableCell(size(plan.memory_bytes) + ("" if plan.fits else ", too much"), plan.memory_bytes),
            cells.count_cell(plan.rank_batch),
            TableCell(_describe_data(plan), plan.data_images_per_s),
        ]
        if index == result.chosen:
            row[0] = TableCell(f"{row[0].text} ★")
        rows.append(row)
    names = cells.table_columns(["GPU"], ["ranks"]) + (cells.table_columns(["price"]) if has_spot else [])
    numbers = ["images/s", "time", *([f"cost, {currency}"] if currency else [])]
    columns = [*names, *cells.table_columns([], numbers), *cells.table_columns(limits)]
    columns += [*cells.table_columns([], ["memory", "batch per rank"]), *cells.table_columns(["data per node"])]
    return Table("Plans", columns, rows, MAX_OPEN_ROWS, "more plans", num_names=3 if has_spot else 2)


def _describe_data(plan: QuotedPlan) -> str:
    needed = f"{per_second(plan.data_images_per_s)} images/s"
    return f"waits for data: {needed} needed" if plan.waits_for_data else f"needs {needed}"


def _describe_table(result: QuoteResult) -> str:
    star = " ★ marks the plan that the answer names first." if result.chosen is not None else ""
    limits = (
        " A limit is kept (yes) if the whole interval keeps it, and likely if the middle of the interval does."
        if result.by_hours is not None or result.budget is not None
        else ""
    )
    return f"Small print is the interval, which is meant to hold nine times in ten.{star}{limits}"


def _parts_table(result: QuoteResult) -> Table:
    rows = [
        [TableCell(_name(plan)), *(TableCell(_duration(plan.parts[name]), plan.parts[name]) for name in PARTS)]
        for plan in result.plans
    ]
    return Table("Parts of the time", cells.table_columns([""], PARTS), rows, is_folded=True)


def _chart_blocks(result: QuoteResult) -> list[Block]:
    has_prices = bool(result.currency)
    lines: dict[tuple[str, str], list[QuotedPlan]] = {}
    for plan in result.plans:
        if math.isfinite(plan.hours.value) and plan.fits:
            lines.setdefault((plan.gpu, plan.pricing), []).append(plan)
    if not lines:
        return []
    unit = f"cost, {clean_text(result.currency, 10)}" if has_prices else "GPU-hours"
    chart = Chart(
        f"{'Cost' if has_prices else 'GPU time'} over time",
        "hours, log scale",
        f"{unit}, log scale",
        [_chart_line(*key, plans) for key, plans in lines.items()],
        low=None,
        note="A point is a number of GPUs. The bar is its interval; that of the hours is as wide.",
        rule=None if result.budget is None else (result.budget, "budget"),
        log_x=True,
        log_y=True,
    )
    return [ChartRow([chart])]


def _chart_line(gpu: str, pricing: str, plans: Sequence[QuotedPlan]) -> ChartLine:
    points: list[Point] = []
    bounds: dict[Point, tuple[float, float]] = {}
    for plan in sorted(plans, key=lambda each: each.hours.value):
        amount = plan.cost
        if amount is None:
            low, high = ((each or 0.0) * plan.ranks for each in (plan.hours.low, plan.hours.high))
            amount = Interval(value=plan.hours.value * plan.ranks, low=low, high=high)
        if not amount.value > 0:  # a free GPU has no place on a log axis
            continue
        point = (plan.hours.value, amount.value)
        points.append(point)
        if amount.low is not None and amount.high is not None:
            bounds[point] = (amount.low, amount.high)
    is_spot = pricing == "spot"
    name = clean_text(f"{gpu}{' on spot' if is_spot else ''}", 40)
    return ChartLine(
        name, points, has_markers=True, group=clean_text(gpu, 40), is_dashed=is_spot, bounds=bounds
    )
