"""Build the page of a ladder, with the commands that train its best recipe."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from paceline.core.experiments.results import LadderResult, RungResult
from paceline.core.stages import STAGES
from paceline.core.units import count, milliseconds, number, seconds, size
from paceline.report import cells
from paceline.report.document import (
    BarChart,
    BarRow,
    BarSegment,
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
from paceline.report.experiment_common import (
    MAX_OPEN_ROWS,
    PARITY_COLUMNS,
    ExperimentReport,
    RateBar,
    bottleneck_of,
    describe_bounds,
    parity_cells,
    rate_bars,
    shell_command,
)
from paceline.report.text import clean_text

_ROOT_FIELD: Final = "data.source.root"
# Arguments of `paceline data pack` for each data set that `lab/prepare_data.py` makes. The ladder deletes these data,
# so a first command prepares them again outside of its folder.
_PACK_ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    "source.pack": ("packed.pack",),
    "source-256.pack": ("packed.pack", "--resize", "256", "--quality", "90"),
    "source.lmdb": ("packed.lmdb", "--format", "lmdb"),
}
_STATUS_LABELS: Final = {"kept": "kept", "dropped": "dropped", "failed": "failed", "left_out": "left out"}
_STATUS_COLOURS: Final = (("kept", "c-kept"), ("dropped", "c-dropped"))


def ladder_table(result: LadderResult) -> Table:
    """Return a row per rung: its change, gain and outcome."""
    has_ranks = _ranks_differ(result)
    columns = [TableColumn("rung", is_number=False), TableColumn("changes", is_number=False, is_wide=True)]
    columns += [*([TableColumn("ranks")] if has_ranks else []), TableColumn("images/s"), *_time_columns(result)]
    columns += [
        TableColumn("over below"),
        TableColumn("over first"),
        TableColumn("peak memory"),
        TableColumn("start-up"),
    ]
    columns += [TableColumn("loss", is_number=False), TableColumn("outcome", is_number=False, is_wide=True)]
    return Table("Rungs", columns, [_rung_row(result, rung) for rung in result.rungs])


def build_ladder_page(report: ExperimentReport, result: LadderResult) -> ReportPage:
    """Return the report of a ladder."""
    kept_rungs = _kept_rungs(result)
    status = f"{len(kept_rungs)} of {len(result.rungs)} rungs kept", _status_tone(result)
    subtitle = [f"ladder {result.ladder}", f"recipe {result.recipe} {result.recipe_hash}"]
    subtitle += [count(result.ranks, "rank"), f"batch {result.batch_size:,}"]
    sections = [
        _rungs_section(result),
        _steps_section(result),
        _parity_section(result),
        _costs_section(result),
        next_steps_section(report, result),
    ]
    facts = [
        ("ladder", cells.text_cell(result.ladder)),
        ("counted steps per run", cells.count_cell(result.steps)),
        ("warm-up steps", cells.count_cell(result.warmup_steps)),
        ("interleaved runs of each", cells.count_cell(result.repeats)),
        ("total time of runs and data preparation", cells.seconds_cell(result.wall_s)),
    ]
    runs = [(rung.name, rung.runs) for rung in result.rungs]
    sections.append(report.build_provenance(result.command, facts, result.provenance, runs))
    best = next((rung for rung in kept_rungs if rung.name == result.best), None)
    verdict = None if best is None else bottleneck_of("the best rung", best.verdict)
    return report.build_page("Ladder report", status, subtitle, _ladder_figures(result, best), sections, verdict)


def _kept_rungs(result: LadderResult) -> list[RungResult]:
    return [rung for rung in result.rungs if rung.status == "kept"]


def _status_tone(result: LadderResult) -> Tone:
    if any(rung.status == "failed" for rung in result.rungs):
        return "warning"
    return "good" if len(_kept_rungs(result)) > 1 else "warning"


def _ladder_figures(result: LadderResult, best: RungResult | None) -> list[KeyFigure]:
    others = [
        f"{sum(rung.status == status for rung in result.rungs)} {_STATUS_LABELS[status]}"
        for status in ("dropped", "failed", "left_out")
        if any(rung.status == status for rung in result.rungs)
    ]
    figures = []
    if best is not None and best.over_first is not None:
        times = best.over_first
        cell = TableCell(f"{times.value:,.2f}x", times.value)
        figures.append(KeyFigure("as fast as the first rung", cell, describe_bounds(times)))
    if best is not None and best.images_per_s is not None:
        first = result.rungs[0].images_per_s
        note = f"the first rung: {number(round(first.value, 1))}" if first else ""
        rate = best.images_per_s
        figures.append(KeyFigure("images/s", TableCell(cells.format_rate(rate.value), rate.value), note))
    figures.append(
        KeyFigure("rungs kept", TableCell(f"{len(_kept_rungs(result))} of {len(result.rungs)}"), ", ".join(others))
    )
    num_runs = sum(len(rung.runs) for rung in result.rungs)
    note = f"{count(num_runs, 'run')} of {count(result.steps, 'counted step')}" if num_runs else ""
    figures.append(KeyFigure("runs took", cells.seconds_cell(result.wall_s), note))
    return figures


def _rungs_section(result: LadderResult) -> PageSection:
    blocks: list[Block] = [Paragraph(clean_text(result.summary, 1000))] if result.summary else []
    bars = [
        RateBar(
            clean_text(rung.name), rung.images_per_s, cells.format_rate(rung.images_per_s.value), _rung_colour(rung)
        )
        for rung in result.rungs
        if rung.images_per_s is not None
    ]
    if bars:
        blocks.append(rate_bars("Images/s of each rung", "means, 95 % intervals", bars, _STATUS_COLOURS))
    rule = (
        "Each rung extends the last one that was kept, and is compared with it in pairs of fresh runs on the same "
        "samples. It is kept if the whole interval of their ratio is above 1 and it trains the same. “Over first” is "
        "the product of the ratios up to the rung."
    )
    has_ranks = _ranks_differ(result)
    columns = [
        TableColumn("rung", is_number=False),
        *([TableColumn("ranks")] if has_ranks else []),
        TableColumn("images/s"),
    ]
    columns += [
        *_time_columns(result),
        TableColumn("over below"),
        TableColumn("over first"),
        TableColumn("outcome", is_number=False, is_wide=True),
    ]
    rows = [
        [
            cells.sentence_cell(rung.name),
            *([_ranks_cell(rung)] if has_ranks else []),
            cells.rate_cell(rung.images_per_s),
            *_time_cells(result, rung),
            cells.ratio_cell(rung.over_below),
            cells.ratio_cell(rung.over_first),
            rung_outcome(rung),
        ]
        for rung in result.rungs
    ]
    changes = [
        [
            cells.sentence_cell(rung.name),
            cells.sentence_cell(rung.explains),
            cells.patch_cell(rung.patch, "the recipe as it is"),
            cells.sentence_cell(rung.below),
        ]
        for rung in result.rungs
    ]
    titles = ("rung", "description", "changes", "over")
    headings = [TableColumn(each, is_number=False, is_wide=each in ("description", "changes")) for each in titles]
    blocks += [Paragraph(rule), Table("Gain of each rung", columns, rows, MAX_OPEN_ROWS, "more rungs")]
    blocks.append(Table("Changes of each rung", headings, changes, MAX_OPEN_ROWS, "more rungs"))
    if result.stopped:
        blocks.append(Paragraph(f"The ladder ends here: {clean_text(result.stopped, 500)}"))
    return PageSection("rungs", "Rungs", blocks)


def _steps_section(result: LadderResult) -> PageSection | None:
    measured = [rung for rung in result.rungs if rung.stages]
    if not measured:
        return None
    longest = max(max(rung.step_s or 0.0, sum(rung.stages.values())) for rung in measured) or 1.0
    names = [name for name in STAGES if any(name in rung.stages for rung in measured)]
    names += sorted({name for rung in measured for name in rung.stages} - set(names))
    rows = [BarRow(clean_text(rung.name), _stage_segments(rung, names, longest), _step_text(rung)) for rung in measured]
    legend = [(cells.stage_label(name), cells.stage_colour(name)) for name in [*names, "residual"]]
    blocks: list[Block] = [BarChart("Time per step by stage", rows, legend, "device time, means", has_table=True)]
    blocks.append(_stage_table(measured, names))
    shrunk = [row for rung in result.rungs for row in _expectation_rows(rung)]
    columns = [TableColumn("rung", is_number=False), TableColumn("expected to shrink", is_number=False)]
    columns += [TableColumn("rung below"), TableColumn("this rung"), TableColumn("change")]
    blocks += [Table("Expectations", columns, shrunk, MAX_OPEN_ROWS, "more stages")] if shrunk else []
    return PageSection("steps", "Time per step", blocks)


def _stage_table(rungs: list[RungResult], names: list[str]) -> Table:
    names = [name for name in names if any(rung.stages.get(name, 0.0) > 0 for rung in rungs)]
    titles = ["rung", "step", *map(cells.stage_label, names)]
    columns = [TableColumn(title, is_number=index > 0) for index, title in enumerate(titles)]
    rows = [
        [
            cells.sentence_cell(rung.name),
            _milliseconds_cell(rung.step_s),
            *(_milliseconds_cell(rung.stages.get(name)) for name in names),
        ]
        for rung in rungs
    ]
    return Table("Time per step by stage, in milliseconds of device time", columns, rows, MAX_OPEN_ROWS, "more rungs")


def _milliseconds_cell(value_s: float | None) -> TableCell:
    return cells.EMPTY_CELL if value_s is None else TableCell(f"{1000 * value_s:,.2f}", value_s)


def _stage_segments(rung: RungResult, names: list[str], longest: float) -> list[BarSegment]:
    times = {name: rung.stages[name] for name in names if rung.stages.get(name, 0.0) > 0}
    rest = (rung.step_s or 0.0) - sum(rung.stages.values())
    if rest > 0:
        times["residual"] = rest
    return [
        BarSegment(cells.stage_label(name), value / longest, milliseconds(value), cells.stage_colour(name))
        for name, value in times.items()
    ]


def _step_text(rung: RungResult) -> str:
    return seconds(rung.step_s if rung.step_s is not None else sum(rung.stages.values()))


def _expectation_rows(rung: RungResult) -> list[list[TableCell]]:
    rows = []
    for stage in rung.expects:
        below, now = rung.shrank.get(stage, (None, None))
        if below is None or now is None:
            row = [cells.text_cell("not measured"), TableCell(""), TableCell("")]
        else:
            change = now / below - 1 if below else None
            row = [cells.milliseconds_cell(below), cells.milliseconds_cell(now)]
            row.append(TableCell("" if change is None else f"{100 * change:+.1f} %", change))
        rows.append([cells.sentence_cell(rung.name), cells.text_cell(cells.stage_label(stage)), *row])
    return rows


def _parity_section(result: LadderResult) -> PageSection:
    rows = [[cells.sentence_cell(rung.name), *parity_cells(rung.parity)] for rung in result.rungs if rung.parity]
    columns = [TableColumn("rung", is_number=False), *PARITY_COLUMNS]
    table = Table("", columns, rows, MAX_OPEN_ROWS, "more rungs")
    nothing = cells.missing_paragraph("No losses were compared.")
    return PageSection("parity", "Training parity", [table if rows else nothing])


def _costs_section(result: LadderResult) -> PageSection:
    has_gpu = any(rung.device_bytes is not None for rung in result.rungs)
    columns = [TableColumn("rung", is_number=False), TableColumn("host memory")]
    columns += [TableColumn("GPU memory")] if has_gpu else []
    columns += [TableColumn("start-up"), TableColumn("compilation"), TableColumn("data preparation")]
    rows = [
        [
            cells.sentence_cell(rung.name),
            _bytes_cell(rung.host_bytes),
            *([_bytes_cell(rung.device_bytes)] if has_gpu else []),
            cells.seconds_cell(rung.startup_s),
            cells.seconds_cell(rung.compile_s or None),
            cells.seconds_cell(rung.prepare_s or None),
        ]
        for rung in result.rungs
        if rung.startup_s is not None or rung.host_bytes is not None
    ]
    note = "Memory is the peak of rank 0. Start-up is the time from the start of the process to the first step."
    nothing = cells.missing_paragraph("No rung's memory or start-up was measured.")
    table = Table("", columns, rows, MAX_OPEN_ROWS, "more rungs")
    return PageSection("costs", "Memory and start-up", [Paragraph(note), table] if rows else [nothing])


def _ranks_differ(result: LadderResult) -> bool:
    return any(rung.ranks not in (None, result.ranks) for rung in result.rungs)


def _ranks_cell(rung: RungResult) -> TableCell:
    return cells.EMPTY_CELL if rung.ranks is None else cells.count_cell(rung.ranks)


def _time_columns(result: LadderResult) -> list[TableColumn]:
    # Results of older versions have neither epochs nor steps.
    epoch = [TableColumn("per epoch")] if any(rung.epoch_s is not None for rung in result.rungs) else []
    steps = [TableColumn(count(result.steps, "step"))] if any(rung.steps_s is not None for rung in result.rungs) else []
    return [*epoch, *steps]


def _time_cells(result: LadderResult, rung: RungResult) -> list[TableCell]:
    times = {"per epoch": rung.epoch_s, count(result.steps, "step"): rung.steps_s}
    return [cells.seconds_cell(times[column.title]) for column in _time_columns(result)]


def _rung_row(result: LadderResult, rung: RungResult) -> list[TableCell]:
    return [
        cells.sentence_cell(rung.name),
        cells.patch_cell(rung.patch, "the recipe"),
        *([_ranks_cell(rung)] if _ranks_differ(result) else []),
        cells.rate_cell(rung.images_per_s),
        *_time_cells(result, rung),
        cells.ratio_cell(rung.over_below),
        cells.ratio_cell(rung.over_first),
        _bytes_cell(rung.device_bytes if rung.device_bytes is not None else rung.host_bytes),
        cells.seconds_cell(rung.startup_s),
        cells.sentence_cell(rung.parity.verdict if rung.parity else ""),
        rung_outcome(rung),
    ]


def rung_outcome(rung: RungResult) -> TableCell:
    """Return whether a rung was kept, and why."""
    return cells.sentence_cell(": ".join(filter(None, (_STATUS_LABELS[rung.status], rung.why))))


def _rung_colour(rung: RungResult) -> str:
    return "c-kept" if rung.status == "kept" else "c-dropped"


def _bytes_cell(num_bytes: int | None) -> TableCell:
    return cells.EMPTY_CELL if num_bytes is None else TableCell(size(num_bytes), num_bytes)


def next_steps_section(report: ExperimentReport, result: LadderResult) -> PageSection:
    """Return the commands that train the kept changes."""
    if not result.best_patch:
        return PageSection("take", "Next steps", [cells.missing_paragraph("No change was kept: keep the recipe.")])
    blocks: list[Block] = []
    for why, arguments in build_next_commands(report.path, result):
        blocks += [Paragraph(clean_text(why)), shell_command(arguments)]
    return PageSection("take", "Next steps", blocks)


def build_next_commands(folder: Path, result: LadderResult) -> list[tuple[str, list[str]]]:
    """Return pairs of a sentence and a command; the last command trains."""
    patch = result.best_patch
    root = next((value for key, _, value in (word.partition("=") for word in patch) if key == _ROOT_FIELD), "")
    pack_arguments = _find_pack_arguments(folder, root)
    steps: list[tuple[str, list[str]]] = []
    if pack_arguments:
        why = "The ladder has deleted the data that it prepared. To prepare them again:"
        steps.append((why, ["paceline", "data", "pack", str(folder), *pack_arguments]))
        patch = tuple(
            f"{_ROOT_FIELD}={pack_arguments[0]}" if word.startswith(f"{_ROOT_FIELD}=") else word for word in patch
        )
    # As many ranks as the best rung was measured on.
    best = next((rung.ranks for rung in result.rungs if rung.name == result.best), None)
    why = f"To train the whole recipe with all changes that were kept, up to the rung “{result.best}”:"
    steps.append((why, ["paceline", "train", str(folder), *patch, "--ranks", str(best or result.ranks)]))
    return steps


def _find_pack_arguments(folder: Path, root: str) -> Sequence[str]:
    path = Path(root)
    # The folder may have been moved or linked, so compare its name only. Data elsewhere still exist.
    names = (folder.absolute().name, folder.resolve().name)
    is_ours = path.parent.name == "data" and path.parent.parent.name in names
    return _PACK_ARGUMENTS.get(path.name, ()) if is_ours else ()
