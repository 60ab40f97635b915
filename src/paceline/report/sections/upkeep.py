"""Report reliability: goodput, checkpoints, processes, warnings and bad images."""

from typing import Any

from paceline.core.results import CheckpointResult, GoodputResult
from paceline.core.stages import spoken
from paceline.core.units import seconds, share, size
from paceline.report.blocks import Bar, Block, Cell, Column, Facts, Part, Section, Table
from paceline.report.run import Rows, Run
from paceline.report.sections import cells
from paceline.report.words import clean, finite

_NUM_OPEN = 20


def upkeep(run: Run) -> Section:
    """Return the reliability section."""
    result = run.result
    blocks: list[Block] = []
    if result is not None and result.goodput is not None and result.goodput.wall_s > 0:
        blocks.append(_goodput(result.goodput))
    else:
        blocks.append(cells.missing("Goodput is unknown: the run has not finished, or did not record it."))
    if result is not None and result.checkpoints is not None:
        blocks.append(Facts(_checkpoints(result.checkpoints), "Checkpoints"))
    if run.attempts.rows:
        blocks.append(_attempts(run.attempts))
    return Section("upkeep", "Reliability", [*blocks, _warnings(run.warnings), *_bad_images(run.bad_images)])


def _goodput(goodput: GoodputResult) -> Bar:
    parts = (
        ("useful", goodput.useful_s, "c-useful"),
        ("start-up", goodput.startup_s, "c-start-up"),
        (spoken("data_wait"), goodput.data_wait_s, "c-data-wait"),
        (spoken("evaluate"), goodput.eval_s, "c-evaluate"),
        (spoken("checkpoint"), goodput.checkpoint_s, "c-checkpoint"),
        ("repeated steps", goodput.rework_s, "c-rework"),
        ("down", goodput.down_s, "c-down"),
        ("other", goodput.other_s, "c-other"),
    )
    starts = "one start" if goodput.starts == 1 else f"{goodput.starts} starts"
    return Bar(
        f"Goodput over {starts}: {seconds(goodput.useful_s)} of {seconds(goodput.wall_s)} were steps that count",
        [Part(name, each_s / goodput.wall_s, seconds(each_s), colour) for name, each_s, colour in parts if each_s > 0],
        ["0 s", seconds(goodput.wall_s / 2), seconds(goodput.wall_s)],
        f"goodput {share(goodput.share)}",
    )


def _checkpoints(result: CheckpointResult) -> list[tuple[str, Cell]]:
    rows = [("saved", cells.count(result.saved))]
    rows += [("failed", cells.count(result.failed))] if result.failed else []
    if result.saved:
        rows.append(("size of one", Cell(size(result.bytes), result.bytes)))
        rows.append(("training stalled for", cells.of_seconds(result.stall_s)))
        rows.append(("written to disk after", cells.of_seconds(result.write_s)))
    return rows


def _attempts(events: Rows) -> Table:
    rows: list[list[Cell]] = []
    for each in events.rows:
        if each.get("event") == "start":
            rows.append([*_start(each), Cell(""), Cell(""), Cell("no end recorded")])
        elif rows:
            rows[-1][-3:] = [
                _moment(each, "ended_s"),
                _count(each, "step"),
                cells.text(str(each.get("how", "")).replace("_", " ")),
            ]
    titles = ("started", "ranks", "start-up", "from step", "ended", "at step", "how")
    columns = [Column(each, is_number=each not in ("started", "ended", "how")) for each in titles]
    return Table("Processes", columns, rows, _NUM_OPEN, f"all {len(rows):,}")


def _start(record: dict[str, Any]) -> list[Cell]:
    startup_s = finite(record.get("startup_s"))
    startup = Cell("") if startup_s is None else cells.of_seconds(startup_s)
    return [_moment(record, "started_s"), _count(record, "world_size"), startup, _count(record, "from_step")]


def _moment(record: dict[str, Any], key: str) -> Cell:
    return cells.of_moment(finite(record.get(key)))


def _count(record: dict[str, Any], key: str) -> Cell:
    value = finite(record.get(key))
    return Cell("") if value is None else cells.count(value)


def _warnings(records: Rows) -> Block:
    if not records.total:
        return cells.missing("No warnings were logged.")
    rows = [[_moment(each, "unix_s"), Cell(clean(each.get("message", ""), 500))] for each in records.rows]
    columns = [Column("when", is_number=False), Column("warning", is_number=False)]
    title = (
        f"Warnings ({records.total:,})"
        if records.total == len(rows)
        else f"The first {len(rows)} of {records.total:,} warnings"
    )
    return Table(title, columns, rows, 10, f"all {len(rows)}")


def _bad_images(records: Rows) -> list[Block]:
    if not records.total:
        return []
    rows = [
        [cells.text(each.get("split", "")), cells.text(each.get("path", each.get("name", "")), 200),
         cells.text(each.get("reason", ""), 200)]
        for each in records.rows
    ]  # fmt: skip
    columns = [Column(each, is_number=False) for each in ("split", "image", "why it was left out")]
    return [Table(f"Images that could not be read ({records.total:,})", columns, rows, 5, f"{len(rows)} of them")]
