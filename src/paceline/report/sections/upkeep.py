"""Report reliability: goodput, checkpoints, processes, warnings and bad images."""

from typing import Any

from paceline.core.results import CheckpointResult, GoodputResult
from paceline.core.stages import display_name
from paceline.core.units import seconds, share, size
from paceline.report.blocks import (
    BarSegment,
    Block,
    KeyValueList,
    PageSection,
    StackedBar,
    Table,
    TableCell,
    TableColumn,
)
from paceline.report.run import FirstRecords, RunData
from paceline.report.sections import cells
from paceline.report.words import clean_text, finite_or_none

_NUM_OPEN_ATTEMPTS = 20


def reliability_section(run: RunData) -> PageSection:
    """Return the reliability section."""
    result = run.result
    blocks: list[Block] = []
    if result is not None and result.goodput is not None and result.goodput.wall_s > 0:
        blocks.append(_goodput_bar(result.goodput))
    else:
        blocks.append(cells.missing_paragraph("Goodput is unknown: the run has not finished, or did not record it."))
    if result is not None and result.checkpoints is not None:
        blocks.append(KeyValueList(_checkpoint_rows(result.checkpoints), "Checkpoints"))
    if run.attempts.rows:
        blocks.append(_attempt_table(run.attempts))
    return PageSection(
        "upkeep", "Reliability", [*blocks, _warning_table(run.warnings), *_bad_image_tables(run.bad_images)]
    )


def _goodput_bar(goodput: GoodputResult) -> StackedBar:
    parts = (
        ("useful", goodput.useful_s, "c-useful"),
        ("start-up", goodput.startup_s, "c-start-up"),
        (display_name("data_wait"), goodput.data_wait_s, "c-data-wait"),
        (display_name("evaluate"), goodput.eval_s, "c-evaluate"),
        (display_name("checkpoint"), goodput.checkpoint_s, "c-checkpoint"),
        ("repeated steps", goodput.rework_s, "c-rework"),
        ("down", goodput.down_s, "c-down"),
        ("other", goodput.other_s, "c-other"),
    )
    starts = "one start" if goodput.starts == 1 else f"{goodput.starts} starts"
    return StackedBar(
        f"Goodput over {starts}: {seconds(goodput.useful_s)} of {seconds(goodput.wall_s)} were steps that count",
        [
            BarSegment(name, each_s / goodput.wall_s, seconds(each_s), colour)
            for name, each_s, colour in parts
            if each_s > 0
        ],
        ["0 s", seconds(goodput.wall_s / 2), seconds(goodput.wall_s)],
        f"goodput {share(goodput.share)}",
    )


def _checkpoint_rows(result: CheckpointResult) -> list[tuple[str, TableCell]]:
    rows = [("saved", cells.count_cell(result.saved))]
    rows += [("failed", cells.count_cell(result.failed))] if result.failed else []
    if result.saved:
        rows.append(("size of one", TableCell(size(result.bytes), result.bytes)))
        rows.append(("training stalled for", cells.seconds_cell(result.stall_s)))
        rows.append(("written to disk after", cells.seconds_cell(result.write_s)))
    return rows


def _attempt_table(events: FirstRecords) -> Table:
    rows: list[list[TableCell]] = []
    for each in events.rows:
        if each.get("event") == "start":
            rows.append([*_start_cells(each), TableCell(""), TableCell(""), TableCell("no end recorded")])
        elif rows:
            rows[-1][-3:] = [
                _time_cell(each, "ended_s"),
                _count_cell(each, "step"),
                cells.text_cell(str(each.get("how", "")).replace("_", " ")),
            ]
    titles = ("started", "ranks", "start-up", "from step", "ended", "at step", "how")
    columns = [TableColumn(each, is_number=each not in ("started", "ended", "how")) for each in titles]
    return Table("Processes", columns, rows, _NUM_OPEN_ATTEMPTS, f"all {len(rows):,}")


def _start_cells(record: dict[str, Any]) -> list[TableCell]:
    startup_s = finite_or_none(record.get("startup_s"))
    startup = TableCell("") if startup_s is None else cells.seconds_cell(startup_s)
    return [
        _time_cell(record, "started_s"),
        _count_cell(record, "world_size"),
        startup,
        _count_cell(record, "from_step"),
    ]


def _time_cell(record: dict[str, Any], key: str) -> TableCell:
    return cells.time_cell(finite_or_none(record.get(key)))


def _count_cell(record: dict[str, Any], key: str) -> TableCell:
    value = finite_or_none(record.get(key))
    return TableCell("") if value is None else cells.count_cell(value)


def _warning_table(records: FirstRecords) -> Block:
    if not records.total:
        return cells.missing_paragraph("No warnings were logged.")
    rows = [[_time_cell(each, "unix_s"), TableCell(clean_text(each.get("message", ""), 500))] for each in records.rows]
    columns = [TableColumn("when", is_number=False), TableColumn("warning", is_number=False)]
    title = (
        f"Warnings ({records.total:,})"
        if records.total == len(rows)
        else f"The first {len(rows)} of {records.total:,} warnings"
    )
    return Table(title, columns, rows, 10, f"all {len(rows)}")


def _bad_image_tables(records: FirstRecords) -> list[Block]:
    if not records.total:
        return []
    rows = [
        [cells.text_cell(each.get("split", "")), cells.text_cell(each.get("path", each.get("name", "")), 200),
         cells.text_cell(each.get("reason", ""), 200)]
        for each in records.rows
    ]  # fmt: skip
    columns = [TableColumn(each, is_number=False) for each in ("split", "image", "why it was left out")]
    return [Table(f"Images that could not be read ({records.total:,})", columns, rows, 5, f"{len(rows)} of them")]
