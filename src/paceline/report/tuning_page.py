"""Build the pages of a settings search and of a sweep over one setting."""

from collections.abc import Sequence
from typing import Final

from paceline.core.experiments.results import SweepPoint, SweepResult, TriedResult, TuneResult
from paceline.core.stages import display_name
from paceline.core.statistics import Interval
from paceline.core.units import count
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
    ExperimentReport,
    RateBar,
    bottleneck_of,
    describe_bounds,
    measured_line,
    parity_cells,
    plain_line,
    rate_bars,
    shell_command,
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


def tuning_table(result: TuneResult) -> Table:
    """Return a row per trial setting, in the order of trials."""
    columns = [
        TableColumn("round"),
        TableColumn("settings", is_number=False),
        TableColumn("changes", is_number=False, is_wide=True),
    ]
    columns += [
        TableColumn("over", is_number=False),
        TableColumn("images/s"),
        TableColumn("ratio"),
        TableColumn("steps"),
        TableColumn("trials"),
    ]
    columns += [TableColumn("outcome", is_number=False, is_wide=True)]
    return Table("Tried", columns, [_tried_row(tried) for tried in result.tried], MAX_OPEN_ROWS, "more settings")


def build_tuning_page(report: ExperimentReport, result: TuneResult) -> ReportPage:
    """Return the report of a search for the fastest settings."""
    subtitle = [f"recipe {result.recipe} {result.recipe_hash}", count(result.ranks, "rank")]
    facts = [
        ("counted steps per run", cells.count_cell(result.steps)),
        ("warm-up steps", cells.count_cell(result.warmup_steps)),
        ("runs of the final pairs", cells.count_cell(result.repeats)),
        ("runs in all", cells.count_cell(result.trials)),
        ("settings in the space searched", cells.count_cell(result.grid)),
        ("total time of runs", cells.seconds_cell(result.wall_s)),
    ]
    runs = [(tried.name, tried.runs) for tried in result.tried]
    origin = report.build_provenance(result.command, facts, result.provenance, runs)
    sections = [
        _best_settings_section(result),
        _tried_section(result),
        _explanations_section(result),
        _parity_section(result),
        origin,
    ]
    verdict = bottleneck_of("the tuned recipe" if result.best_patch else "the recipe", result.verdict)
    return report.build_page(
        "Tuning report", _tuning_status(result), subtitle, _tuning_figures(result), sections, verdict
    )


def _tuning_status(result: TuneResult) -> tuple[str, Tone]:
    if not result.best_patch:
        return "nothing faster was found", "warning"
    return f"{count(len(result.best_patch), 'setting')} changed", "good"


def _tuning_figures(result: TuneResult) -> list[KeyFigure]:
    figures = []
    if result.gain is not None:
        cell = TableCell(f"{result.gain.value:,.2f}x", result.gain.value)
        figures.append(KeyFigure("as fast as the recipe was", cell, describe_bounds(result.gain)))
    rate = result.best.value
    note = f"the recipe as it was: {cells.format_rate(result.first.value)}"
    figures.append(KeyFigure("images/s", TableCell(cells.format_rate(rate), rate), note))
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
        own_code = ["--own-code"] if result.provenance.get("own_parts") else []
        command = ["paceline", "train", result.recipe_file, "--ranks", str(result.ranks), *own_code]
        blocks += [Paragraph("To train the tuned recipe:"), shell_command(command)]
    return PageSection("take", "Next steps", blocks)


def _tried_section(result: TuneResult) -> PageSection:
    measured_bars = [
        RateBar(
            clean_text(f"{each.round}: {each.name}"),
            Interval(value=each.images_per_s),
            cells.format_rate(each.images_per_s),
            "c-kept" if each.status == "won" else "c-dropped",
        )
        for each in result.tried
        if each.images_per_s is not None
    ]
    most = (
        f"; the first {MAX_OPEN_ROWS} of {len(measured_bars)} are drawn" if len(measured_bars) > MAX_OPEN_ROWS else ""
    )
    first = RateBar("the recipe as it was", result.first, cells.format_rate(result.first.value), "c-other")
    best = RateBar("the tuned recipe", result.best, cells.format_rate(result.best.value), "c-kept")
    note = f"of the longest run of each, with intervals for several runs{most}"
    bars = rate_bars("Images/s of trials", note, [first, *measured_bars[:MAX_OPEN_ROWS], best], _STATUS_COLOURS)
    rule = (
        "Each setting is compared with the best one so far. It wins if the whole interval of their ratio is above 1 "
        "and it trains the same. Ratios decide instead of images/s, since the speed of a machine varies over time."
    )
    before = bottleneck_of("The recipe as it was", result.first_verdict)
    bottleneck = [Paragraph(" ".join(filter(None, (f"{before.bottleneck}.", before.evidence))))] if before else []
    return PageSection("tried", "Trials", [bars, *bottleneck, Paragraph(rule), tuning_table(result)])


def _explanations_section(result: TuneResult) -> PageSection | None:
    descriptions = {tried.name: tried.explains for tried in result.tried if tried.explains}
    if not descriptions:
        return None
    rows = [[cells.sentence_cell(name), cells.sentence_cell(explains)] for name, explains in descriptions.items()]
    columns = [TableColumn("settings", is_number=False), TableColumn("description", is_number=False, is_wide=True)]
    return PageSection(
        "settings", "Description of settings", [Table("", columns, rows, MAX_OPEN_ROWS, "more settings")]
    )


def _parity_section(result: TuneResult) -> PageSection | None:
    rows = [[cells.sentence_cell(tried.name), *parity_cells(tried.parity)] for tried in result.tried if tried.parity]
    table = Table("", [TableColumn("settings", is_number=False), *PARITY_COLUMNS], rows, MAX_OPEN_ROWS, "more settings")
    return PageSection("parity", "Training parity", [table]) if rows else None


def _tried_row(tried: TriedResult) -> list[TableCell]:
    return [
        cells.count_cell(tried.round),
        cells.sentence_cell(tried.name),
        cells.patch_cell(tried.patch, "nothing"),
        cells.sentence_cell(tried.over),
        cells.rate_cell(None if tried.images_per_s is None else Interval(value=tried.images_per_s)),
        cells.ratio_cell(tried.ratio),
        cells.count_cell(tried.steps),
        cells.count_cell(tried.trials),
        tried_outcome(tried),
    ]


def tried_outcome(tried: TriedResult) -> TableCell:
    """Return the outcome and its reason."""
    return cells.sentence_cell(": ".join(filter(None, (_STATUS_LABELS[tried.status], tried.why))))


def sweep_table(result: SweepResult) -> Table:
    """Return a row per value."""
    columns = [TableColumn(clean_text(result.key), is_number=False), TableColumn("images/s"), TableColumn("spread")]
    columns += [TableColumn("per step"), TableColumn("waits for data"), TableColumn("per epoch")]
    columns += [TableColumn("note", is_number=False, is_wide=True)]
    return Table("Values", columns, [_sweep_row(point) for point in result.points], MAX_OPEN_ROWS, "more values")


def build_sweep_page(report: ExperimentReport, result: SweepResult) -> ReportPage:
    """Return the report of a sweep."""
    facts = [
        ("ranks", cells.count_cell(result.ranks)),
        ("counted steps per run", cells.count_cell(result.steps)),
        ("warm-up steps", cells.count_cell(result.warmup_steps)),
        ("interleaved runs of each", cells.count_cell(result.repeats)),
        ("total time of runs", cells.seconds_cell(result.wall_s)),
    ]
    runs = [(clean_text(f"{result.key}={point.value}"), point.runs) for point in result.points]
    subtitle = [f"speed over {result.key}", f"recipe {result.recipe} {result.recipe_hash}"]
    origin = report.build_provenance(result.command, facts, result.provenance, runs)
    return report.build_page(
        "Profile over a setting",
        _sweep_status(result),
        subtitle,
        _sweep_figures(result),
        [_speed_section(result), _stages_section(result), origin],
    )


def _sweep_status(result: SweepResult) -> tuple[str, Tone]:
    failed = sum(bool(point.error) for point in result.points)
    if failed:
        return f"{failed} of {len(result.points)} values failed", "bad" if failed == len(result.points) else "warning"
    if any(point.starved for point in result.points):
        return "measured, with a caution", "warning"
    return f"{count(len(result.points), 'value')} measured", "good"


def _sweep_figures(result: SweepResult) -> list[KeyFigure]:
    best = next((point for point in result.points if point.value == result.fastest), None)
    if best is None or best.images_per_s is None:
        return []
    rate = best.images_per_s.value
    figures = [
        KeyFigure(
            clean_text(f"images/s, {result.key}={best.value}"),
            TableCell(cells.format_rate(rate), rate),
            _format_spread(best),
        )
    ]
    if best.epoch_s is not None:
        figures.append(KeyFigure("per epoch", cells.seconds_cell(best.epoch_s), "training alone, at that speed"))
    if best.data_wait_s is not None and best.step_s:
        figures.append(KeyFigure("waits for data", cells.share_cell(best.data_wait_s / best.step_s), "of a step"))
    return figures


def _speed_section(result: SweepResult) -> PageSection:
    points = [point for point in result.points if point.images_per_s is not None]
    blocks: list[Block] = [Paragraph(clean_text(result.sentence, 500))]
    numbers = [_numeric_value(point) for point in points]
    if len(points) > 1 and all(each is not None for each in numbers):
        blocks.append(ChartRow(_sweep_charts(result.key, [each for each in numbers if each is not None], points)))
    elif points:
        bars = [
            RateBar(
                clean_text(point.value),
                _speed_interval(point),
                cells.format_rate(point.images_per_s.value),
                "c-kept" if point.is_fastest else "c-other",
            )
            for point in points
            if point.images_per_s is not None
        ]
        legend = [("fastest, or not distinguishable from it", "c-kept"), ("slower", "c-other")]
        blocks.append(
            rate_bars(f"Images/s over {clean_text(result.key)}", "lowest and highest", bars[:MAX_OPEN_ROWS], legend)
        )
    blocks.append(sweep_table(result))
    return PageSection("speed", "Speed", blocks)


def _sweep_charts(key: str, xs: Sequence[float], points: Sequence[SweepPoint]) -> list[Chart]:
    log_x = min(xs) > 0 and max(xs) >= _LOG_AXIS_RATIO * min(xs)
    pairs = list(zip(xs, points, strict=True))
    speed = measured_line("images/s", [(x, _speed_interval(point)) for x, point in pairs])
    epoch = plain_line("per epoch", [(x, point.epoch_s) for x, point in pairs])
    step = plain_line("per step", [(x, _to_milliseconds(point.step_s)) for x, point in pairs])
    wait = plain_line("data wait", [(x, _to_milliseconds(point.data_wait_s)) for x, point in pairs])
    name = clean_text(key)
    return [
        Chart("Speed", name, "images/s", [speed], note="bars show the lowest and highest", log_x=log_x),
        Chart("Seconds per epoch", name, "s", [epoch], log_x=log_x),
        Chart("Step time", name, "ms", [step, wait], log_x=log_x),
    ]


def _stages_section(result: SweepResult) -> PageSection | None:
    names = list(dict.fromkeys(name for point in result.points for name in point.stages))
    if not names:
        return None
    columns = [
        TableColumn(clean_text(result.key), is_number=False),
        *(TableColumn(display_name(name)) for name in names),
        TableColumn("per step"),
    ]
    rows = [
        [
            cells.text_cell(point.value),
            *(_optional_milliseconds_cell(point.stages.get(name)) for name in names),
            _optional_milliseconds_cell(point.step_s),
        ]
        for point in result.points
        if point.stages
    ]
    note = (
        "Milliseconds per step of rank 0, on a GPU in device time. They are medians over runs, so they need not add up."
    )
    return PageSection(
        "stages", "Stages of a step", [Paragraph(note), Table("", columns, rows, MAX_OPEN_ROWS, "more values")]
    )


def _numeric_value(point: SweepPoint) -> float | None:
    try:
        return finite_or_none(float(point.value))
    except ValueError:
        return None


def _speed_interval(point: SweepPoint) -> Interval:
    assert point.images_per_s is not None, point
    low, high = point.spread or (None, None)
    return Interval(value=point.images_per_s.value, low=low, high=high)


def _format_spread(point: SweepPoint) -> str:
    if point.spread is None:
        return ""
    return f"{cells.format_rate(point.spread[0])} to {cells.format_rate(point.spread[1])}"


def _to_milliseconds(value_s: float | None) -> float | None:
    return None if value_s is None else 1000 * value_s


def _optional_milliseconds_cell(value_s: float | None) -> TableCell:
    return cells.EMPTY_CELL if value_s is None else cells.milliseconds_cell(value_s)


def _sweep_row(point: SweepPoint) -> list[TableCell]:
    rate = None if point.images_per_s is None else Interval(value=point.images_per_s.value)
    best = "fastest" if point.is_fastest else ""
    return [
        cells.text_cell(point.value),
        cells.rate_cell(rate),
        TableCell(_format_spread(point)),
        _optional_milliseconds_cell(point.step_s),
        _optional_milliseconds_cell(point.data_wait_s),
        cells.seconds_cell(point.epoch_s),
        cells.sentence_cell(point.error or ", ".join(filter(None, (best, point.bottleneck)))),
    ]
