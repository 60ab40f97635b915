"""Build the page of `paceline quote`: the answer, the plans, cost over time, assumptions and the command."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from paceline.core.quote_result import (
    PARTS,
    VERDICTS,
    QuotedPlan,
    QuoteResult,
    format_hours,
    format_limits,
    format_range,
)
from paceline.core.statistics import Interval
from paceline.core.units import count, number, per_second, size
from paceline.report import cells
from paceline.report.charts import NUM_LINE_STYLES
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
from paceline.report.experiment_common import chart_line, shell_command
from paceline.report.text import clean_text

_CANNOT_KNOW: Final = (
    "A quote is computed from datasheets and from measurements of other networks. It cannot know the CPU that launches "
    "the kernels, the cooling of the GPU, other programs on the node, or the versions of the libraries. Before you "
    "rent eight GPUs, train on one of them for a few minutes with log.quote: the run says how far off the quote was."
)
_MAX_OPEN_PLANS: Final = 12
_MAX_RULE_RATIO: Final = 1.5
"""Limit of a budget over the most expensive plan beyond which its line would flatten the chart."""


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
        PageSection("assumptions", "Assumptions", [KeyValueList(facts), *map(_note_sentence, result.notes)]),
        PageSection("limits", "What it cannot know", [Paragraph(_CANNOT_KNOW)]),
        PageSection("origin", "Repeat it", [shell_command(result.command)]),
    ]
    status, tone = _describe_status(result)
    return ReportPage(
        title=f"Quote for {clean_text(result.recipe, 80)}",
        subtitle=[*_describe_recipe(result), *_describe_prices(result)],
        status=status,
        tone=tone,
        figures=_list_figures(result),
        sections=sections,
        paceline=clean_text(result.paceline),
        about="Quote",
        source="datasheets of GPUs and a fitted model of their kernels. Nothing was trained",
        summary=[answer, plans, assumed, *notes],
    )


def _note_sentence(note: str) -> Paragraph:
    text = clean_text(note, 600)
    return Paragraph(f"{text[:1].upper()}{text[1:]}.")


def _describe_recipe(result: QuoteResult) -> list[str]:
    return [clean_text(result.assumptions[name], 160) for name in ("model", "length") if name in result.assumptions]


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
        return "a plan keeps the limits", "good"
    is_likely = verdicts <= {"yes", "likely"}
    return ("a plan likely keeps the limits", "warning") if is_likely else ("no plan keeps the limits", "bad")


def _chosen_plan(result: QuoteResult) -> QuotedPlan | None:
    return None if result.chosen is None else result.plans[result.chosen]


def _name(plan: QuotedPlan) -> str:
    return clean_text(f"{plan.ranks:,} x {plan.gpu}", 60)


def _name_cell(plan: QuotedPlan) -> TableCell:
    return TableCell(_name(plan), note=plan.pricing if plan.pricing == "spot" else "")


def _list_figures(result: QuoteResult) -> list[KeyFigure]:
    plan = _chosen_plan(result)
    if plan is None:
        return []
    on_spot = "on spot, " if plan.pricing == "spot" else ""
    figures = [KeyFigure("plan", TableCell(_name(plan)), on_spot + clean_text(plan.device, 80))]
    figures.append(KeyFigure("time", _time_cell(plan.hours), format_range(plan.hours, format_hours)))
    if plan.cost is not None:
        cost = cells.number_cell(plan.cost.value)
        figures.append(KeyFigure(f"cost, {clean_text(result.currency, 10)}", cost, format_range(plan.cost, number)))
    speed = plan.images_per_s
    return [*figures, KeyFigure("images/s", cells.rate_cell(speed.value), format_range(speed, per_second))]


def _time_cell(hours: Interval, note: str = "") -> TableCell:
    return TableCell(format_hours(hours.value), hours.value, note=note)


def _cost_cell(plan: QuotedPlan) -> TableCell:
    if plan.cost is None:
        return cells.number_cell(None)
    if not math.isfinite(plan.cost.value):
        return TableCell("without end", plan.cost.value)
    return TableCell(number(plan.cost.value), plan.cost.value, note=format_range(plan.cost, number))


def _order(result: QuoteResult) -> list[int]:
    """Return the indices of the plans, the best first: the one that was chosen, then by limits, cost and time."""

    def rank(index: int) -> tuple[bool, bool, int, float, float]:
        plan = result.plans[index]
        worst = max(map(VERDICTS.index, (plan.ends_in_time, plan.is_within_budget)))
        hours = plan.hours.value
        cost = hours * plan.ranks if plan.cost is None else plan.cost.value
        costs_first = (cost, hours) if plan.cost is not None or result.by_hours is not None else (hours, cost)
        is_budget_alone = result.by_hours is None and result.budget is not None
        return (index != result.chosen, not plan.fits, worst, *((hours, cost) if is_budget_alone else costs_first))

    return sorted(range(len(result.plans)), key=rank)


def _plans_table(result: QuoteResult) -> Table:
    plans, currency = [result.plans[index] for index in _order(result)], clean_text(result.currency, 10)
    has_batches = len({plan.rank_batch for plan in plans}) > 1
    names = ["time", *([f"cost, {currency}"] if currency else [])]
    time, budget = format_limits(result.by_hours, result.budget, currency)
    limits = [*([f"within {time}"] if time else []), *([f"for {budget}"] if budget else [])]
    others = [
        "images/s",
        *(["batch per rank"] if has_batches else []),
        "data per node, images/s",
        "memory",
        "largest micro-batch",
    ]
    columns = [
        *cells.table_columns(["plan"], names),
        *cells.table_columns(limits),
        *cells.table_columns([], others),
    ]
    rows = []
    for plan in plans:
        row = [
            _name_cell(plan),
            _time_cell(plan.hours, format_range(plan.hours, format_hours)),
            *([_cost_cell(plan)] if currency else []),
            *([TableCell(plan.ends_in_time)] if result.by_hours is not None else []),
            *([TableCell(plan.is_within_budget)] if result.budget is not None else []),
            cells.rate_cell(plan.images_per_s),
            *([cells.count_cell(plan.rank_batch)] if has_batches else []),
            TableCell(
                per_second(plan.data_images_per_s),
                plan.data_images_per_s,
                note="waits for data" if plan.waits_for_data else "",
            ),
            TableCell(size(plan.memory_bytes), plan.memory_bytes, note="" if plan.fits else "too much"),
            cells.count_cell(plan.largest_micro_batch),
        ]
        rows.append(row)
    return Table("Plans", columns, rows, _MAX_OPEN_PLANS, "more plans")


def _describe_table(result: QuoteResult) -> str:
    first = "The plan of the answer is first. " if result.chosen is not None else ""
    limits = (
        " A limit is kept (yes) if the whole interval keeps it, and likely if its middle does."
        if result.by_hours is not None or result.budget is not None
        else ""
    )
    return (
        f"{first}Small print has intervals that are meant to hold nine times in ten.{limits} Data per node is what the "
        "data path of a node must give so that its GPUs do not wait in a training step."
    )


def _parts_table(result: QuoteResult) -> Table:
    rows = [
        [_name_cell(plan), *(TableCell(format_hours(plan.parts[name]), plan.parts[name]) for name in PARTS)]
        for plan in map(result.plans.__getitem__, _order(result))
    ]
    return Table("Parts of the time", cells.table_columns([""], PARTS), rows, is_folded=True)


def _chart_blocks(result: QuoteResult) -> list[Block]:
    has_prices = bool(result.currency)
    able = [plan for plan in map(result.plans.__getitem__, _order(result)) if _is_able(plan)]
    names = list(dict.fromkeys(plan.gpu for plan in able))
    shown: dict[tuple[str, str], list[QuotedPlan]] = {}
    for plan in able:
        if plan.gpu in names[:NUM_LINE_STYLES]:
            shown.setdefault((plan.gpu, plan.pricing), []).append(plan)
    lines = [line for key, plans in shown.items() if (line := _chart_line(*key, plans)).points]
    if not lines:
        return []
    highest = max(high for line in lines for _, high in line.bounds.values())
    budget = result.budget
    few = f" Of the {len(names)} GPUs, these have the best plans." if len(names) > NUM_LINE_STYLES else ""
    dashed = " Dashed: on spot." if any(line.is_dashed for line in lines) else ""
    ruled = " The dotted line is the budget." if budget is not None and budget <= _MAX_RULE_RATIO * highest else ""
    chart = Chart(
        f"{'Cost' if has_prices else 'GPU time'} over time",
        "hours, log scale",
        f"cost, {clean_text(result.currency, 10)}, log scale" if has_prices else "GPU-hours, log scale",
        lines,
        low=None,
        note=f"Each point is a number of GPUs with its interval; that of the hours is as wide.{dashed}{ruled}{few}",
        rule=(budget, "") if budget is not None and ruled else None,  # intervals would cross its name
        log_x=True,
        log_y=True,
    )
    return [ChartRow([chart])]


def _is_able(plan: QuotedPlan) -> bool:
    return plan.fits and math.isfinite(plan.hours.high or math.inf)


def _chart_line(gpu: str, pricing: str, plans: Sequence[QuotedPlan]) -> ChartLine:
    amounts = []
    for plan in plans:
        amount = plan.cost
        if amount is None:
            low, high = ((each or 0.0) * plan.ranks for each in (plan.hours.low, plan.hours.high))
            amount = Interval(value=plan.hours.value * plan.ranks, low=low, high=high)
        if amount.value > 0:  # a GPU without cost has no place on a log axis
            amounts.append((plan.hours.value, amount))
    is_spot = pricing == "spot"
    name = clean_text(f"{gpu}{' on spot' if is_spot else ''}", 40)
    return replace(chart_line(name, amounts, group=clean_text(gpu, 40)), is_dashed=is_spot)
