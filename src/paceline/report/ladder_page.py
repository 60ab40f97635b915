"""Build the page of a ladder, with the commands that train its best recipe."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from paceline.core.experiments.results import LadderResult, RungResult, ScriptChanges
from paceline.core.stages import STAGES
from paceline.core.units import count, milliseconds, seconds
from paceline.report import cells
from paceline.report.document import (
    BarChart,
    BarRow,
    BarSegment,
    Block,
    Command,
    KeyFigure,
    PageSection,
    Paragraph,
    ReportPage,
    TableCell,
    Tone,
)
from paceline.report.experiment_common import (
    MAX_COMMAND_CHARS,
    PARITY_COLUMNS,
    PARITY_KEYS,
    SPREAD_COLUMNS,
    Column,
    ExperimentReport,
    RateBar,
    Record,
    ResultRows,
    build_record,
    describe_bounds,
    measurement_facts,
    rate_bars,
    shell_command,
    stage_columns,
    step_ms_cell,
)
from paceline.report.text import clean_text

_ROOT_FIELD: Final = "data.source.root"
# Arguments of `paceline data pack` for each dataset that `lab/prepare_data.py` makes. The ladder deletes these data,
# so a first command prepares them again outside of its folder.
_PACK_ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    "source.pack": ("packed.pack",),
    "source-256.pack": ("packed.pack", "--resize", "256", "--quality", "90"),
    "source.lmdb": ("packed.lmdb", "--format", "lmdb"),
}
_STATUS_LABELS: Final = {"kept": "kept", "dropped": "dropped", "failed": "failed", "left_out": "left out"}
_STATUS_COLOURS: Final = (("kept", "c-kept"), ("dropped", "c-dropped"))
_COLUMNS: Final = (
    Column("rung", "rung"),
    Column("status"),
    Column("why"),
    Column("patch", "changes", lambda patch: cells.patch_cell(patch, "the recipe"), is_wide=True),
    Column("below", "over"),
    Column("ranks", "ranks", cells.count_cell),
    Column("images_per_s", "images/s", cells.rate_cell, has_interval=True),
    *SPREAD_COLUMNS,
    Column("over_below", "over below", cells.ratio_cell, has_interval=True),
    Column("over_first", "over first", cells.ratio_cell, has_interval=True),
    Column("step_s", "step", step_ms_cell),
    Column("epoch_s", "per epoch", cells.seconds_cell),
    Column("steps_s", "measured steps", cells.seconds_cell),
    Column("startup_s", "start-up", cells.seconds_cell),
    Column("compile_s", "compilation", lambda value_s: cells.seconds_cell(value_s or None)),
    Column("prepare_s", "data preparation", lambda value_s: cells.seconds_cell(value_s or None)),
    Column("host_bytes", "host memory", cells.bytes_cell),
    Column("device_bytes", "GPU memory", cells.bytes_cell),
    *PARITY_COLUMNS,
    Column("bottleneck"),
    Column("expects"),
    Column("explains", "description", is_wide=True, in_csv=False),
    Column("outcome", "outcome", is_wide=True, in_csv=False),
)
_EXPECTATION_COLUMNS: Final = (
    Column("rung", "rung"),
    Column("stage", "expected to shrink"),
    Column("below", "rung below", cells.as_is),
    Column("now", "this rung", cells.milliseconds_cell),
    Column("change", "change", cells.change_cell),
)


def ladder_rows(result: LadderResult) -> ResultRows:
    """Return a row per rung."""
    records = [
        build_record(
            rung,
            rung=rung.name,
            bottleneck=rung.verdict.get("bottleneck"),
            outcome=": ".join(filter(None, (_STATUS_LABELS[rung.status], rung.why))),
        )
        for rung in result.rungs
    ]
    ranks = "ranks" if any(rung.ranks not in (None, result.ranks) for rung in result.rungs) else ""
    return ResultRows(
        (*_COLUMNS, *stage_columns(result.rungs)),
        records,
        "Rungs",
        f"rung patch {ranks} images_per_s epoch_s steps_s over_below over_first host_bytes device_bytes startup_s "
        "parity outcome",
        "more rungs",
    )


def build_ladder_page(report: ExperimentReport, result: LadderResult) -> ReportPage:
    """Return the report of a ladder."""
    rows, kept_rungs = ladder_rows(result), _kept_rungs(result)
    ranks = "ranks" if " ranks " in rows.main else ""
    gains = rows.table(
        f"rung {ranks} images_per_s epoch_s steps_s over_below over_first outcome", title="Gain of each rung"
    )
    next_steps = _next_steps_section(report, result)
    what = f"script {result.recipe}" if result.script else f"recipe {result.recipe} {result.recipe_hash}"
    subtitle = [f"ladder {result.ladder}", what, count(result.ranks, "rank")]
    subtitle += [f"batch {result.batch_size:,}"] if result.batch_size else []
    stopped = [Paragraph(f"The ladder ends here: {clean_text(result.stopped, 500)}")] if result.stopped else []
    facts = [("ladder", cells.text_cell(result.ladder)), *measurement_facts(result)]
    runs = [(rung.name, rung.runs) for rung in result.rungs]
    sections = [
        _rungs_section(
            result, [gains, rows.table("rung explains patch below", title="Changes of each rung"), *stopped]
        ),
        next_steps,
        _steps_section(result, rows),
        _parity_section(rows),
        _costs_section(rows),
        report.build_provenance(result.command, facts, result.provenance, runs),
    ]
    best = next((rung for rung in kept_rungs if rung.name == result.best), None)
    return report.build_page(
        "Ladder report",
        (f"{len(kept_rungs)} of {len(result.rungs)} rungs kept", _status_tone(result)),
        subtitle,
        _ladder_figures(result, best),
        sections,
        None if best is None else cells.summarize_verdict(best.verdict, "the best rung"),
        summary=[
            rows.table(f"rung {ranks} images_per_s epoch_s over_below over_first outcome", title="Rungs"),
            *stopped,
            *next_steps.blocks,
        ],
    )


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
        times = cells.ratio_cell(best.over_first)
        note = describe_bounds(best.over_first)
        figures.append(KeyFigure("as fast as the first rung", TableCell(times.text, times.value), note))
    if best is not None and best.images_per_s is not None:
        first = cells.rate_cell(result.rungs[0].images_per_s).text
        note = f"the first rung: {first}" if first else ""
        figures.append(KeyFigure("images/s", cells.rate_cell(best.images_per_s.value), note))
    figures.append(
        KeyFigure("rungs kept", TableCell(f"{len(_kept_rungs(result))} of {len(result.rungs)}"), ", ".join(others))
    )
    num_runs = sum(len(rung.runs) for rung in result.rungs)
    note = f"{count(num_runs, 'run')} of {count(result.steps, 'measured step')}" if num_runs else ""
    # The sum has the time of preparing data too.
    figures.append(KeyFigure("runs took", cells.seconds_cell(result.wall_s), note))
    return figures


def _rungs_section(result: LadderResult, tables: Sequence[Block]) -> PageSection:
    blocks: list[Block] = [Paragraph(clean_text(result.summary, 1000))] if result.summary else []
    bars = [
        RateBar(clean_text(rung.name), rung.images_per_s, "c-kept" if rung.status == "kept" else "c-dropped")
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
    return PageSection("rungs", "Rungs", [*blocks, Paragraph(rule), *tables])


def _steps_section(result: LadderResult, rows: ResultRows) -> PageSection | None:
    measured = [rung for rung in result.rungs if rung.stages]
    if not measured:
        return None
    longest = max(max(rung.step_s or 0.0, sum(rung.stages.values())) for rung in measured) or 1.0
    names = [name for name in STAGES if any(name in rung.stages for rung in measured)]
    names += sorted({name for rung in measured for name in rung.stages} - set(names))
    bars = [BarRow(clean_text(rung.name), _stage_segments(rung, names, longest), _step_text(rung)) for rung in measured]
    legend = [(cells.stage_label(name), cells.stage_colour(name)) for name in [*names, "residual"]]
    shown = [f"stage_{name}_s" for name in names if any(rung.stages.get(name, 0.0) > 0 for rung in measured)]
    table = rows.table(
        "rung step_s", *shown, title="Time per step by stage, in milliseconds of device time", having=shown
    )
    expectations = ResultRows(_EXPECTATION_COLUMNS, [*_expectation_records(result)], more="more stages")
    blocks: list[Block] = [BarChart("Time per step by stage", bars, legend, "device time, means", has_table=True)]
    blocks.append(table)
    if expectations.records:
        blocks.append(expectations.table("rung stage below now change", title="Expectations", num_names=2))
    return PageSection("steps", "Time per step", blocks)


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


def _expectation_records(result: LadderResult) -> Iterator[Record]:
    for rung in result.rungs:
        for stage in rung.expects:
            below, now = rung.shrank.get(stage, (None, None))
            yield {
                "rung": rung.name,
                "stage": cells.stage_label(stage),
                "below": TableCell("not measured") if below is None else cells.milliseconds_cell(below),
                "now": now,
                "change": now / below - 1 if now is not None and below else None,
            }


def _parity_section(rows: ResultRows) -> PageSection:
    table = rows.table(f"rung {PARITY_KEYS}", having=["parity"])
    nothing = cells.missing_paragraph("No losses were compared.")
    return PageSection("parity", "Training parity", [table if table.rows else nothing])


def _costs_section(rows: ResultRows) -> PageSection:
    table = rows.table(
        "rung host_bytes device_bytes startup_s compile_s prepare_s",
        having=["startup_s", "host_bytes"],
    )
    note = "Memory is the peak of rank 0. Start-up is the time from the start of the process to the first step."
    nothing = cells.missing_paragraph("No rung's memory or start-up was measured.")
    return PageSection("costs", "Memory and start-up", [Paragraph(note), table] if table.rows else [nothing])


def _next_steps_section(report: ExperimentReport, result: LadderResult) -> PageSection:
    """Return the commands that train the kept changes."""
    if result.script is not None:
        return _script_section(result, result.script)
    if not result.best_patch:
        return PageSection("take", "Next steps", [cells.missing_paragraph("No change was kept: keep the recipe.")])
    blocks: list[Block] = []
    patch = result.best_patch
    root = next((value for key, _, value in (word.partition("=") for word in patch) if key == _ROOT_FIELD), "")
    pack_arguments = _find_pack_arguments(report.path, root)
    if pack_arguments:
        blocks.append(Paragraph("The ladder has deleted the data that it prepared. To prepare them again:"))
        blocks.append(shell_command(["paceline", "data", "pack", str(report.path), *pack_arguments]))
        patch = tuple(
            f"{_ROOT_FIELD}={pack_arguments[0]}" if word.startswith(f"{_ROOT_FIELD}=") else word for word in patch
        )
    # As many ranks as the best rung was measured on.
    best = next((rung.ranks for rung in result.rungs if rung.name == result.best), None)
    why = f"To train the whole recipe with all changes that were kept, up to the rung “{clean_text(result.best)}”:"
    train = ["paceline", "train", str(report.path), *patch, "--ranks", str(best or result.ranks)]
    return PageSection("take", "Next steps", [*blocks, Paragraph(why), shell_command(train)])


def _script_section(result: LadderResult, script: ScriptChanges) -> PageSection:
    """Return the command with the changes that were kept, and the code to write."""
    note: list[Block] = [Paragraph(clean_text(f"Caution: {script.note}.", 1000))] if script.note else []
    if result.best == result.rungs[0].name:
        return PageSection(
            "take", "Next steps", [*note, cells.missing_paragraph("No change was kept: keep the script.")]
        )
    why = f"To train with all changes that were kept, up to the rung “{clean_text(result.best)}”:"
    blocks: list[Block] = [*note, Paragraph(why), Command(clean_text(script.best_command, MAX_COMMAND_CHARS))]
    if script.best_code:
        blocks += [Paragraph("with these changes in the script:"), *map(Command, script.best_code)]
    return PageSection("take", "Next steps", blocks)


def _find_pack_arguments(folder: Path, root: str) -> Sequence[str]:
    path = Path(root)
    # The folder may have been moved or linked, so compare its name only. Data elsewhere still exist.
    names = (folder.absolute().name, folder.resolve().name)
    is_ours = path.parent.name == "data" and path.parent.parent.name in names
    return _PACK_ARGUMENTS.get(path.name, ()) if is_ours else ()
