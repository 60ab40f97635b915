"""Build the page of a search for the fastest settings."""

from typing import Final

from paceline.core.experiments.tuning import TriedResult, TuneResult
from paceline.core.interval import Interval
from paceline.core.units import count
from paceline.report.blocks import (
    Block,
    KeyFigure,
    PageSection,
    Paragraph,
    ReportPage,
    Table,
    TableCell,
    TableColumn,
    Tone,
)
from paceline.report.experiments.frame import (
    MAX_OPEN_ROWS,
    ExperimentReport,
    RateBar,
    bottleneck_of,
    describe_bounds,
    rate_bars,
    shell_command,
)
from paceline.report.experiments.parity import PARITY_COLUMNS, parity_cells
from paceline.report.sections import cells, intervals
from paceline.report.words import clean_text

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
    note = f"the recipe as it was: {intervals.format_rate(result.first.value)}"
    figures.append(KeyFigure("images/s", TableCell(intervals.format_rate(rate), rate), note))
    note = f"{count(result.grid, 'setting')} in the space that was searched"
    figures.append(KeyFigure("runs", cells.count_cell(result.trials), note))
    figures.append(KeyFigure("total time of runs", cells.seconds_cell(result.wall_s), clean_text(result.stopped)))
    return figures


def _best_settings_section(result: TuneResult) -> PageSection:
    if not result.best_patch:
        return PageSection("take", "Next steps", [cells.missing_paragraph("No setting is faster: keep the recipe.")])
    pairs = [word.partition("=") for word in result.best_patch]
    rows = [[cells.text_cell(key), intervals.sentence_cell(value)] for key, _, value in pairs]
    columns = [TableColumn("setting", is_number=False), TableColumn("best", is_number=False)]
    blocks: list[Block] = [Table("", columns, rows)]
    if result.recipe_file:
        own_code = ["--own-code"] if result.provenance.get("own_parts") else []
        command = ["paceline", "train", result.recipe_file, "--ranks", str(result.ranks), *own_code]
        blocks += [Paragraph("To train the tuned recipe:"), shell_command(command)]
    return PageSection("take", "Next steps", blocks)


def _tried_section(result: TuneResult) -> PageSection:
    measured_bars = [
        RateBar(clean_text(f"{each.round}: {each.name}"), Interval(value=each.images_per_s), intervals.format_rate(each.images_per_s),
             "c-kept" if each.status == "won" else "c-dropped")
        for each in result.tried
        if each.images_per_s is not None
    ]  # fmt: skip
    most = (
        f"; the first {MAX_OPEN_ROWS} of {len(measured_bars)} are drawn" if len(measured_bars) > MAX_OPEN_ROWS else ""
    )
    first = RateBar("the recipe as it was", result.first, intervals.format_rate(result.first.value), "c-other")
    best = RateBar("the tuned recipe", result.best, intervals.format_rate(result.best.value), "c-kept")
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
    rows = [
        [intervals.sentence_cell(name), intervals.sentence_cell(explains)] for name, explains in descriptions.items()
    ]
    columns = [TableColumn("settings", is_number=False), TableColumn("description", is_number=False, is_wide=True)]
    return PageSection(
        "settings", "Description of settings", [Table("", columns, rows, MAX_OPEN_ROWS, "more settings")]
    )


def _parity_section(result: TuneResult) -> PageSection | None:
    rows = [
        [intervals.sentence_cell(tried.name), *parity_cells(tried.parity)] for tried in result.tried if tried.parity
    ]
    table = Table("", [TableColumn("settings", is_number=False), *PARITY_COLUMNS], rows, MAX_OPEN_ROWS, "more settings")
    return PageSection("parity", "Training parity", [table]) if rows else None


def _tried_row(tried: TriedResult) -> list[TableCell]:
    return [
        cells.count_cell(tried.round),
        intervals.sentence_cell(tried.name),
        intervals.patch_cell(tried.patch, "nothing"),
        intervals.sentence_cell(tried.over),
        intervals.rate_interval_cell(None if tried.images_per_s is None else Interval(value=tried.images_per_s)),
        intervals.ratio_interval_cell(tried.ratio),
        cells.count_cell(tried.steps),
        cells.count_cell(tried.trials),
        tried_outcome(tried),
    ]


def tried_outcome(tried: TriedResult) -> TableCell:
    """Return the outcome and its reason."""
    return intervals.sentence_cell(": ".join(filter(None, (_STATUS_LABELS[tried.status], tried.why))))
