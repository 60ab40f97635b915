"""Build the page of `paceline watch`."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from paceline import __version__
from paceline.core.stages import DATA_WAIT, EPOCH_BOUNDARY, EXPOSED, WATCHED
from paceline.core.units import count, milliseconds, per_second, seconds, share, size
from paceline.core.watch_result import RankTimeline, WatchResult
from paceline.report import cells
from paceline.report.document import (
    BarChart,
    BarRow,
    Block,
    Chart,
    ChartLine,
    ChartRow,
    Command,
    KeyFigure,
    KeyValueList,
    PageSection,
    Paragraph,
    ReportPage,
    Table,
    TableCell,
)
from paceline.report.text import clean_text
from paceline.report.time_sections import mean_step_table, rank_table, straggler_paragraph
from paceline.report.timeline_sections import START_UP, TRAINING, Span, draw_spans

_KINDS: Final = {
    START_UP: ("start-up", "c-start-up"),
    TRAINING: ("training", "c-useful"),
    EPOCH_BOUNDARY: ("starting the loader", "c-epoch-boundary"),
    "evaluate": ("evaluation", "c-evaluate"),
    "checkpoint": ("checkpoint", "c-checkpoint"),
}
_UNSEEN: Final = "other: time of a step in code that paceline does not observe"
_MAX_NOTES: Final = 20


def build_watch_page(result: WatchResult, path: Path) -> ReportPage:
    """Return the page of the folder `path`; a terminal shows its figures and tables."""
    stages = mean_step_table(result.stages, result.measured_steps, "rank 0")
    notes = [Paragraph(clean_text(each, 600)) for each in result.notes[:_MAX_NOTES]]
    tables: list[Block] = [*([stages] if stages else []), *_rank_blocks(result)]
    sections = [
        PageSection("time", "Where the time went", _time_blocks(result, stages)),
        PageSection("ranks", "Ranks", _rank_blocks(result)) if result.world_size > 1 else None,
        PageSection("timeline", "Timeline", _timeline_blocks(result.timeline)) if result.timeline else None,
        PageSection("notes", "What could not be told apart", notes) if notes else None,
        PageSection("origin", "Provenance", _origin_blocks(result)),
    ]
    return ReportPage(
        title=clean_text(path.resolve().name),
        subtitle=_subtitle(result),
        status=f"exit code {result.exit_code}",
        tone="bad" if result.exit_code else "good",
        figures=_figures(result),
        verdict=cells.summarize_verdict(result.verdict),
        sections=[each for each in sections if each is not None],
        paceline=result.paceline,
        about="A watched training script",
        source="result.json, which sums up the records in watch/. Its numbers are rounded here only",
        summary=[KeyValueList(_pause_rows(result)), *tables, *(Paragraph(f"note: {each.text}") for each in notes)],
    )


def _subtitle(result: WatchResult) -> list[str]:
    texts = [
        clean_text(result.framework),
        count(result.world_size, "rank") if result.world_size else "",
        count(len(result.hosts), "host") if len(result.hosts) > 1 else "",
        f"torch {clean_text(result.torch)}" if result.torch else "",
    ]
    return [each for each in texts if each]


def _figures(result: WatchResult) -> list[KeyFigure]:
    if not result.measured_steps:
        return [KeyFigure("steps", cells.count_cell(result.steps))]
    low, high = map(milliseconds, result.step_spread)
    steps = f"{count(result.measured_steps, 'step')} after {result.warmup_steps:,} of warm-up"
    figures = [KeyFigure("step", cells.milliseconds_cell(result.step_s), f"{low} to {high}, {steps}")]
    if result.samples_per_s is not None:
        cell = TableCell(per_second(result.samples_per_s), result.samples_per_s)
        figures.append(KeyFigure("samples/s", cell, f"of {count(result.world_size, 'rank')}, without pauses"))
    named = KeyFigure("attributed", cells.share_cell(result.attributed), "of step time is in named stages")
    figures.append(named)
    if result.memory_bytes is not None:
        figures.append(KeyFigure("GPU memory", TableCell(size(result.memory_bytes), result.memory_bytes), "at most"))
    return figures


def _pause_rows(result: WatchResult) -> list[tuple[str, TableCell]]:
    rows = [(cells.stage_label(START_UP), cells.seconds_cell(result.start_up_s))] if result.start_up_s else []
    for name, each_s in sorted(result.pauses.items(), key=lambda each: -each[1]):
        text = f"{seconds(each_s)} in all, {count(result.num_pauses.get(name, 0), 'pause')}"
        if result.wall_s > 0:
            text += f", {share(each_s / result.wall_s)} of the wall clock"
        rows.append((clean_text(cells.stage_label(name)), TableCell(text, each_s)))
    return rows


def _time_blocks(result: WatchResult, stages: Table | None) -> list[Block]:
    evidence = clean_text(result.verdict.get("evidence", ""), 600)
    if stages is None:
        return [cells.missing_paragraph(evidence or "No step was counted.")]
    step_parts = {name: each.host_s / result.measured_steps for name, each in result.stages.items()}
    step_title = f"A step: {milliseconds(result.step_s)}, the mean of {count(result.measured_steps, 'measured step')}"
    blocks: list[Block] = [cells.time_bar(step_title, step_parts, result.step_s, has_legend=False), stages]
    if "other" in result.stages:
        blocks.append(Paragraph(f"{_UNSEEN}."))
    if result.wall_s > 0:
        parts = {START_UP: result.start_up_s, "stages": result.steps_s, **result.pauses}
        parts["residual"] = max(0.0, result.wall_s - sum(parts.values()))
        title = f"The process of rank 0: {seconds(result.wall_s)}"
        blocks.append(cells.time_bar(title, parts, result.wall_s))
        blocks.append(KeyValueList(_pause_rows(result)))
    return [*blocks, *_curve_charts(result)]


def _curve_charts(result: WatchResult) -> list[Block]:
    curve = result.curve
    if len(curve) < 2:
        return []
    times = [(float(each.step), 1000 * each.step_s) for each in curve]
    lines = [ChartLine("step", times, label="")]
    for key, values in (
        (DATA_WAIT, [each.data_wait_s for each in curve]),
        (EXPOSED, [each.exposed_s for each in curve]),
    ):
        if any(values):
            points = [(float(each.step), 1000 * value_s) for each, value_s in zip(curve, values, strict=True)]
            lines.append(ChartLine(cells.stage_label(key), points, label="communication" if key == EXPOSED else ""))
    return [ChartRow([Chart("Steps of rank 0, without pauses", "step", "ms", lines)])]


def _rank_blocks(result: WatchResult) -> list[Block]:
    if result.world_size < 2:
        return []
    if result.straggler is None:
        return [
            cells.missing_paragraph(
                "The ranks cannot be compared: no step was measured on all of them, or waits are part of other stages."
            )
        ]
    blocks: list[Block] = [straggler_paragraph(result.straggler)]
    return [*blocks, rank_table(result.ranks, on_gpu=result.has_gpu)]


def _timeline_blocks(timelines: Sequence[RankTimeline]) -> list[Block]:
    begin_s, end_s = min(each.started_s for each in timelines), max(each.ended_s for each in timelines)
    whole_s = end_s - begin_s
    if whole_s <= 0:
        return []
    rows, used = [], {START_UP, TRAINING}
    for each in timelines:
        used |= {pause.name for pause in each.pauses}
        spans = [Span(START_UP, each.started_s, each.trained_from_s), Span(TRAINING, each.trained_from_s, each.ended_s)]
        spans += [
            Span(pause.name, pause.unix_s, pause.unix_s + pause.pause_s)
            for pause in each.pauses
            if pause.name in _KINDS and pause.name != START_UP
        ]
        name = f"rank {each.rank}, {clean_text(each.host, 40)}"
        rows.append(BarRow(name, draw_spans(spans, begin_s, whole_s, _KINDS), "killed" if each.is_killed else ""))
    scale = ["0 s", seconds(whole_s / 2), seconds(whole_s)]
    legend = [kind for key, kind in _KINDS.items() if key in used]
    return [BarChart(f"{count(len(rows), 'rank')} in {seconds(whole_s)}", rows, legend=legend, scale=scale)]


def _origin_blocks(result: WatchResult) -> list[Block]:
    rows = [
        ("exit code", cells.count_cell(result.exit_code)),
        ("hosts", cells.text_cell(", ".join(result.hosts), 400)),
        ("torch", cells.text_cell(result.torch)),
        ("Python", cells.text_cell(result.python)),
        ("compute threads per rank", cells.count_cell(result.threads)),
        ("paceline", cells.text_cell(result.paceline)),
    ]
    command = shlex.join(("paceline", "watch", "--", *result.command))
    return [Command(clean_text(command, 2000)), KeyValueList(rows)]


def build_watch_comparison(results: Mapping[str, WatchResult]) -> ReportPage:
    """Return a page with a column per watched folder: the step, its stages, the pauses and the bottleneck."""
    table = _comparison_table(results)
    verdicts = [
        (clean_text(name), TableCell(clean_text(f"{each.verdict['bottleneck']}. {each.verdict['evidence']}", 600)))
        for name, each in results.items()
    ]
    blocks: list[Block] = [table, KeyValueList(verdicts, "Bottlenecks")]
    return ReportPage(
        title="comparison of watched scripts",
        subtitle=(),
        status=count(len(results), "folder"),
        tone="good",
        sections=[PageSection("compare", "Mean step of rank 0", blocks)],
        paceline=__version__,
        about="Comparison",
        source="the result.json of each folder. Its numbers are rounded here only",
        summary=blocks,
    )


def _comparison_table(results: Mapping[str, WatchResult]) -> Table:
    every = list(results.values())
    stages = [name for name in WATCHED if any(name in each.stages for each in every)]
    columns = [
        [
            cells.count_cell(each.world_size),
            cells.milliseconds_cell(each.step_s),
            cells.rate_cell(each.samples_per_s),
            *(_stage_cell(each, name) for name in stages),
            cells.seconds_cell(sum(each.pauses.values())),
        ]
        for each in every
    ]
    names = ["ranks", "step", "samples/s", *map(cells.stage_label, stages), "pauses, in all"]
    rows = [
        [TableCell(name), *(column[number] for column in columns), *_ratio(name, columns, number)]
        for number, name in enumerate(names)
    ]
    titles = [*map(clean_text, results), *(["ratio"] if len(every) == 2 else [])]
    return Table("Mean step of rank 0, without pauses", cells.table_columns([""], titles), rows)


def _stage_cell(result: WatchResult, name: str) -> TableCell:
    if name not in result.stages or not result.measured_steps:
        return cells.EMPTY_CELL
    return cells.milliseconds_cell(result.stages[name].host_s / result.measured_steps)


def _ratio(name: str, columns: Sequence[Sequence[TableCell]], number: int) -> list[TableCell]:
    """Return the second value over the first, for two folders."""
    if len(columns) != 2:
        return []
    first, second = (column[number].value for column in columns)
    return [cells.ratio_cell(second / first) if first and second is not None and name != "ranks" else cells.EMPTY_CELL]
