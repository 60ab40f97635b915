"""Build the page of a learning-rate range test."""

from itertools import zip_longest
from statistics import fmean
from typing import Final

from paceline.core.experiments.results import LrFindResult
from paceline.core.units import count, number
from paceline.report import cells
from paceline.report.document import (
    BarChart,
    BarRow,
    BarSegment,
    Block,
    Chart,
    ChartLine,
    ChartRow,
    Command,
    KeyFigure,
    PageSection,
    Paragraph,
    ReportPage,
    TableCell,
    Tone,
)
from paceline.report.experiment_common import Column, ExperimentReport, ResultRows, caution_paragraphs

_NUM_BARS: Final = 20
# Losses above this many times the first are cut off, as they would hide the fall.
_MAX_RISE: Final = 1.5
_COLUMNS: Final = (
    Column("step", "step", cells.count_cell),
    Column("lr", "learning rate", cells.number_cell),
    Column("loss", "loss", cells.loss_cell),
    Column("smoothed", "smoothed loss", cells.loss_cell),
    Column("runs", "runs", cells.count_cell),
)


def lr_find_rows(result: LrFindResult) -> ResultRows:
    """Return a row per step: its rate, and the mean loss of the runs that reached it."""
    records = []
    for step, (rate, smoothed) in enumerate(zip_longest(result.rates, result.smoothed)):
        losses = [run[step] for run in result.losses if step < len(run)]
        if losses:
            records.append({"step": step, "lr": rate, "loss": fmean(losses), "smoothed": smoothed, "runs": len(losses)})
    return ResultRows(_COLUMNS, records, "Steps", "step lr loss smoothed runs", "more steps")


def build_lr_find_page(report: ExperimentReport, result: LrFindResult) -> ReportPage:
    """Return the report of a range test."""
    take = _suggestion_blocks(result)
    facts = [
        ("ranks", cells.count_cell(result.ranks)),
        ("steps per run", cells.count_cell(result.steps)),
        ("runs", cells.count_cell(result.repeats)),
        ("total time of runs", cells.seconds_cell(result.wall_s)),
    ]
    status: tuple[str, Tone]
    if result.suggestion is None:
        status = ("no learning rate suggested", "bad")
    else:
        status = (f"optim.lr={result.suggestion:g}", "warning" if result.caution else "good")
    sections = [
        PageSection("take", "Next steps", take),
        PageSection("curve", "Loss over learning rate", [ChartRow([_curve(result)]), Paragraph(result.rule)]),
        PageSection("steps", "Steps", [lr_find_rows(result).main_table()]),
        report.build_provenance(result.command, facts, result.provenance, [("range tests", result.runs)]),
    ]
    return report.build_page(
        "Learning-rate range test",
        status,
        [f"recipe {result.recipe} {result.recipe_hash}", count(result.ranks, "rank"), f"batch {result.batch_size:,}"],
        _figures(result),
        sections,
        summary=[_bars(result), *take],
    )


def _figures(result: LrFindResult) -> list[KeyFigure]:
    suggested = TableCell("none" if result.suggestion is None else f"{result.suggestion:g}", result.suggestion)
    tested = f"{number(result.rates[0])} to {number(result.rates[len(result.smoothed) - 1])}"
    return [
        KeyFigure("suggested optim.lr", suggested, f"the recipe has {result.lr:g}"),
        KeyFigure("rates tested", TableCell(tested), f"in {count(len(result.smoothed), 'step')}"),
    ]


def _suggestion_blocks(result: LrFindResult) -> list[Block]:
    blocks = caution_paragraphs(result.caution)
    if result.suggestion is None:
        return blocks
    scope = "The suggestion is the peak of a schedule that decays, such as cosine, for this batch size."
    return [
        *blocks,
        Paragraph(f"Add to the recipe or the command. {scope}"),
        Command(f"optim.lr={result.suggestion:g}"),
    ]


def _top(result: LrFindResult) -> float:
    return _MAX_RISE * max(result.smoothed[0], min(result.smoothed))


def _curve(result: LrFindResult) -> Chart:
    top = _top(result)
    smoothed = [(rate, loss) for rate, loss in zip(result.rates, result.smoothed, strict=False) if loss <= top]
    runs = [
        ChartLine(
            f"run {turn}",
            [(rate, loss) for rate, loss in zip(result.rates, losses, strict=False) if loss <= top],
            group="runs",
        )
        for turn, losses in enumerate(result.losses, start=1)
    ]
    best = None
    if result.suggestion is not None and smoothed:
        nearest = min(smoothed, key=lambda point: abs(point[0] / (result.suggestion or 1.0) - 1))
        best = (nearest, f"suggestion {result.suggestion:g}")
    lines = [ChartLine("smoothed", smoothed), *runs]
    return Chart("Training loss", "optim.lr", "loss", lines, low=None, log_x=True, best=best)


def _bars(result: LrFindResult) -> BarChart:
    """Return the smoothed loss at about evenly spaced rates, as bars that a terminal can draw."""
    num_steps = len(result.smoothed)
    steps = sorted({round(index * (num_steps - 1) / (_NUM_BARS - 1)) for index in range(_NUM_BARS)})
    marked = None
    if result.suggestion is not None:
        suggestion = result.suggestion
        marked = min(steps, key=lambda step: abs(result.rates[step] / suggestion - 1))
    top, lowest = _top(result), min(result.smoothed)
    highest = max(min(result.smoothed[step], top) for step in steps)
    # From a little below the minimum: from 0, the fall of the loss would be hard to see.
    base = lowest - 0.1 * max(highest - lowest, 1e-9)
    rows = []
    for step in steps:
        loss = result.smoothed[step]
        share = (min(loss, highest) - base) / (highest - base)
        text = f"{number(loss)}{'  <- suggestion' if step == marked else ''}"
        rows.append(BarRow(f"{result.rates[step]:.1e}", [BarSegment("loss", share, text, "c-other")], text))
    return BarChart("Smoothed loss over the learning rate", rows, note=f"bars start at {number(base)}", has_table=True)
