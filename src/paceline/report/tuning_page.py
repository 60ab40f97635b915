"""Build the pages of a settings search and of a sweep over one setting."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from paceline.core.experiments.results import SweepPoint, SweepResult, TuneResult
from paceline.core.statistics import Interval
from paceline.core.units import count, per_second
from paceline.report import cells
from paceline.report.document import (
    Block,
    Chart,
    ChartRow,
    KeyFigure,
    PageSection,
    Paragraph,
    ReportPage,
    Table,
    TableCell,
    TableColumn,
    Tone,
)
from paceline.report.experiment_common import (
    MAX_OPEN_ROWS,
    PARITY_COLUMNS,
    PARITY_KEYS,
    SPREAD_COLUMNS,
    Column,
    ExperimentReport,
    RateBar,
    ResultRows,
    build_record,
    chart_line,
    describe_bounds,
    measurement_facts,
    measurement_status,
    rate_bars,
    stage_columns,
    train_command,
)
from paceline.report.text import clean_text, finite_or_none

_STATUS_LABELS: Final = {
    "won": "won",
    "lost": "slower",
    "no_gain": "no gain",
    "starved": "CPU-starved",
    "differs": "trains differently",
    "no_room": "out of memory",
    "failed": "failed",
}
_STATUS_COLOURS: Final = (("won", "c-kept"), ("not taken", "c-dropped"))
# Ratio of the largest to the smallest value from which the x axis is logarithmic.
_LOG_AXIS_RATIO: Final = 8


_COLUMNS: Final = (
    Column("settings", "settings"),
    Column("status"),
    Column("why"),
    Column("patch", "changes", lambda patch: cells.patch_cell(patch, "nothing"), is_wide=True),
    Column("over", "over"),
    Column("round", "round", cells.count_cell),
    Column("steps", "steps", cells.count_cell),
    Column("trials", "trials", cells.count_cell),
    Column("images_per_s", "images/s", cells.rate_cell),
    Column("ratio", "ratio", cells.ratio_cell, has_interval=True),
    *PARITY_COLUMNS,
    Column("explains", "description", is_wide=True),
    Column("outcome", "outcome", is_wide=True, in_csv=False),
)
_SWEEP_COLUMNS: Final = (
    Column("key"),
    Column("value", "value"),
    Column("batch_size"),
    Column("images_per_s", "images/s", cells.rate_cell, has_interval=True),
    *SPREAD_COLUMNS,
    Column("step_s", "per step", cells.milliseconds_cell),
    Column("data_wait_s", "waits for data", cells.milliseconds_cell),
    Column("epoch_s", "per epoch", cells.seconds_cell),
    Column("bottleneck"),
    Column("error"),
    Column("shown_rate", "images/s, lowest to highest", cells.rate_cell, in_csv=False),
    Column("note", "note", is_wide=True, in_csv=False),
)


def tuning_rows(result: TuneResult) -> ResultRows:
    """Return a row per trial setting, in the order of trials."""
    records = [
        build_record(
            tried,
            settings=tried.name,
            outcome=": ".join(filter(None, (_STATUS_LABELS[tried.status], tried.why))),
        )
        for tried in result.tried
    ]
    main = "round settings patch over images_per_s ratio steps trials outcome"
    return ResultRows(_COLUMNS, records, "Tried", main, "more settings", num_names=2)


def build_tuning_page(report: ExperimentReport, result: TuneResult) -> ReportPage:
    """Return the report of a search for the fastest settings."""
    rows, next_steps = tuning_rows(result), _best_settings_section(result)
    facts = measurement_facts(result)
    facts += [("settings in the space searched", cells.count_cell(result.grid))]
    runs = [(tried.name, tried.runs) for tried in result.tried]
    descriptions = replace(
        rows, records=list({record["settings"]: record for record in rows.records if record["explains"]}.values())
    ).table("settings explains")
    parity = rows.table(f"settings {PARITY_KEYS}", having=["parity"])
    status: tuple[str, Tone] = (
        (f"{count(len(result.best_patch), 'setting')} changed", "good")
        if result.best_patch
        else ("nothing faster was found", "warning")
    )
    sections = [
        next_steps,
        _tried_section(result, rows),
        PageSection("settings", "Description of settings", [descriptions]) if descriptions.rows else None,
        PageSection("parity", "Training parity", [parity]) if parity.rows else None,
        report.build_provenance(result.command, facts, result.provenance, runs),
    ]
    outcomes = rows.table("round settings images_per_s ratio outcome", title="Tried", num_names=2)
    return report.build_page(
        "Tuning report",
        status,
        [f"recipe {result.recipe} {result.recipe_hash}", count(result.ranks, "rank")],
        _tuning_figures(result),
        sections,
        cells.summarize_verdict(result.verdict, "the tuned recipe" if result.best_patch else "the recipe"),
        summary=[*([outcomes] if result.tried else []), *next_steps.blocks],
    )


def _tuning_figures(result: TuneResult) -> list[KeyFigure]:
    figures = []
    if result.gain is not None:
        gain = cells.ratio_cell(result.gain.value)
        figures.append(KeyFigure("as fast as the recipe was", gain, describe_bounds(result.gain)))
    note = f"the recipe as it was: {per_second(result.first.value)}"
    figures.append(KeyFigure("images/s", cells.rate_cell(result.best.value), note))
    note = f"{count(result.grid, 'setting')} in the space that was searched"
    figures.append(KeyFigure("runs", cells.count_cell(result.trials), note))
    figures.append(KeyFigure("total time of runs", cells.seconds_cell(result.wall_s), clean_text(result.stopped)))
    return figures


def _best_settings_section(result: TuneResult) -> PageSection:
    if not result.best_patch:
        return PageSection("take", "Next steps", [cells.missing_paragraph("No setting is faster: keep the recipe.")])
    pairs = [word.partition("=") for word in result.best_patch]
    rows = [[cells.text_cell(key), cells.sentence_cell(value)] for key, _, value in pairs]
    columns = [TableColumn("setting", is_number=False), TableColumn("best", is_number=False)]
    blocks: list[Block] = [Table("", columns, rows)]
    if result.recipe_file:
        blocks += [Paragraph("To train the tuned recipe:"), train_command(result)]
    return PageSection("take", "Next steps", blocks)


def _tried_section(result: TuneResult, rows: ResultRows) -> PageSection:
    measured_bars = [
        RateBar(
            clean_text(f"{each.round}: {each.name}"),
            Interval(value=each.images_per_s),
            "c-kept" if each.status == "won" else "c-dropped",
        )
        for each in result.tried
        if each.images_per_s is not None
    ]
    most = (
        f"; the first {MAX_OPEN_ROWS} of {len(measured_bars)} are drawn" if len(measured_bars) > MAX_OPEN_ROWS else ""
    )
    first = RateBar("the recipe as it was", result.first, "c-other")
    best = RateBar("the tuned recipe", result.best, "c-kept")
    note = f"of the longest run of each, with intervals for several runs{most}"
    bars = rate_bars("Images/s of trials", note, [first, *measured_bars[:MAX_OPEN_ROWS], best], _STATUS_COLOURS)
    rule = (
        "Each setting is compared with the best one so far. It wins if the whole interval of their ratio is above 1 "
        "and it trains the same. Ratios decide instead of images/s, since the speed of a machine varies over time."
    )
    before = cells.summarize_verdict(result.first_verdict, "The recipe as it was")
    bottleneck = [Paragraph(" ".join(filter(None, (f"{before.bottleneck}.", before.evidence))))] if before else []
    return PageSection("tried", "Trials", [bars, *bottleneck, Paragraph(rule), rows.main_table()])


def sweep_rows(result: SweepResult) -> ResultRows:
    """Return a row per value."""
    records = [
        build_record(
            point,
            key=result.key,
            shown_rate=None if point.images_per_s is None else _speed_interval(point),
            note=point.error or ", ".join(filter(None, ("fastest" if point.is_fastest else "", point.bottleneck))),
        )
        for point in result.points
    ]
    columns = [
        replace(column, heading=clean_text(result.key)) if column.key == "value" else column
        for column in (*_SWEEP_COLUMNS, *stage_columns(result.points))
    ]
    return ResultRows(columns, records, "Values", "value shown_rate step_s data_wait_s epoch_s note", "more values")


def build_sweep_page(report: ExperimentReport, result: SweepResult) -> ReportPage:
    """Return the report of a sweep."""
    rows, sentence = sweep_rows(result), Paragraph(clean_text(result.sentence, 500))
    facts = [("ranks", cells.count_cell(result.ranks)), *measurement_facts(result)]
    runs = [(clean_text(f"{result.key}={point.value}"), point.runs) for point in result.points]
    sections = [
        PageSection("speed", "Speed", [sentence, *_speed_drawings(result), rows.main_table()]),
        _stages_section(rows),
        report.build_provenance(result.command, facts, result.provenance, runs),
    ]
    return report.build_page(
        "Profile over a setting",
        measurement_status(result.points, "value", "".join(point.starved for point in result.points)),
        [f"speed over {result.key}", f"recipe {result.recipe} {result.recipe_hash}"],
        _sweep_figures(result),
        sections,
        summary=[sentence, rows.main_table()],
    )


def _sweep_figures(result: SweepResult) -> list[KeyFigure]:
    best = next((point for point in result.points if point.value == result.fastest), None)
    if best is None or best.images_per_s is None:
        return []
    rate = cells.rate_cell(_speed_interval(best))
    name = clean_text(f"images/s, {result.key}={best.value}")
    figures = [KeyFigure(name, TableCell(rate.text, rate.value), rate.note)]
    if best.epoch_s is not None:
        figures.append(KeyFigure("per epoch", cells.seconds_cell(best.epoch_s), "training alone, at that speed"))
    if best.data_wait_s is not None and best.step_s:
        figures.append(KeyFigure("waits for data", cells.share_cell(best.data_wait_s / best.step_s), "of a step"))
    return figures


def _speed_drawings(result: SweepResult) -> list[Block]:
    points = [point for point in result.points if point.images_per_s is not None]
    numbers = [_numeric_value(point) for point in points]
    if len(points) > 1 and all(each is not None for each in numbers):
        return [ChartRow(_sweep_charts(result.key, [each for each in numbers if each is not None], points))]
    bars = [
        RateBar(clean_text(point.value), _speed_interval(point), "c-kept" if point.is_fastest else "c-other")
        for point in points[:MAX_OPEN_ROWS]
    ]
    legend = [("fastest, or not distinguishable from it", "c-kept"), ("slower", "c-other")]
    return [rate_bars(f"Images/s over {clean_text(result.key)}", "lowest and highest", bars, legend)] if bars else []


def _sweep_charts(key: str, xs: Sequence[float], points: Sequence[SweepPoint]) -> list[Chart]:
    log_x = min(xs) > 0 and max(xs) >= _LOG_AXIS_RATIO * min(xs)
    pairs = list(zip(xs, points, strict=True))
    speed = chart_line("images/s", [(x, _speed_interval(point)) for x, point in pairs])
    epoch = chart_line("per epoch", [(x, point.epoch_s) for x, point in pairs])
    step = chart_line("per step", [(x, _to_milliseconds(point.step_s)) for x, point in pairs])
    wait = chart_line("data wait", [(x, _to_milliseconds(point.data_wait_s)) for x, point in pairs])
    name = clean_text(key)
    return [
        Chart("Speed", name, "images/s", [speed], note="bars show the lowest and highest", log_x=log_x),
        Chart("Seconds per epoch", name, "s", [epoch], log_x=log_x),
        Chart("Step time", name, "ms", [step, wait], log_x=log_x),
    ]


def _stages_section(rows: ResultRows) -> PageSection | None:
    stages = [column.key for column in rows.columns if column.key.startswith("stage_")]
    if not stages:
        return None
    note = (
        "Milliseconds per step of rank 0, on a GPU in device time. They are medians over runs, so they need not add up."
    )
    table = rows.table("value step_s", *stages, having=stages)
    return PageSection("stages", "Stages of a step", [Paragraph(note), table])


def _numeric_value(point: SweepPoint) -> float | None:
    try:
        return finite_or_none(float(point.value))
    except ValueError:
        return None


def _speed_interval(point: SweepPoint) -> Interval:
    assert point.images_per_s is not None, point
    low, high = point.spread or (None, None)
    return Interval(value=point.images_per_s.value, low=low, high=high)


def _to_milliseconds(value_s: float | None) -> float | None:
    return None if value_s is None else 1000 * value_s
