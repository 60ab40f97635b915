"""How the run kept going: useful time over all its processes, checkpoints, warnings and images left out."""

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
    """Return goodput, checkpoints, processes, warnings and bad images."""
    result = run.result
    blocks: list[Block] = []
    if result is not None and result.goodput is not None and result.goodput.wall_s > 0:
        blocks.append(_goodput(result.goodput))
    else:
        blocks.append(cells.missing("Goodput is not known: the run has not finished, or did not keep account of it."))
    if result is not None and result.checkpoints is not None:
        blocks.append(Facts(_checkpoints(result.checkpoints), "Checkpoints"))
    if run.attempts.rows:
        blocks.append(_attempts(run.attempts))
    return Section("upkeep", "Reliability", [*blocks, _warnings(run.warnings), *_bad_images(run.bad_images)])


def _goodput(found: GoodputResult) -> Bar:
    parts = (
        ("useful", found.useful_s, "c-useful"),
        ("start-up", found.startup_s, "c-start-up"),
        (spoken("data_wait"), found.data_wait_s, "c-data-wait"),
        (spoken("evaluate"), found.eval_s, "c-evaluate"),
        (spoken("checkpoint"), found.checkpoint_s, "c-checkpoint"),
        ("steps done again", found.rework_s, "c-rework"),
        ("down", found.down_s, "c-down"),
        ("other", found.other_s, "c-other"),
    )
    starts = "one start" if found.starts == 1 else f"{found.starts} starts"
    return Bar(
        f"Goodput over {starts}: {seconds(found.useful_s)} of {seconds(found.wall_s)} were steps that count",
        [Part(name, each_s / found.wall_s, seconds(each_s), colour) for name, each_s, colour in parts if each_s > 0],
        ["0 s", seconds(found.wall_s / 2), seconds(found.wall_s)],
        f"goodput {share(found.share)}",
    )


def _checkpoints(found: CheckpointResult) -> list[tuple[str, Cell]]:
    rows = [("saved", cells.count(found.saved))]
    rows += [("failed", cells.count(found.failed))] if found.failed else []
    if found.saved:
        rows.append(("size of one", Cell(size(found.bytes), found.bytes)))
        rows.append(("training stood still for", cells.of_seconds(found.stall_s)))
        rows.append(("safe on disk after", cells.of_seconds(found.write_s)))
    return rows


def _attempts(found: Rows) -> Table:
    """Return a row a process of rank 0, the end beside the start."""
    rows: list[list[Cell]] = []
    for each in found.rows:
        if each.get("event") == "start":
            rows.append([*_start(each), Cell(""), Cell(""), Cell("no end was noted")])
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


def _warnings(found: Rows) -> Block:
    if not found.total:
        return cells.missing("No warnings were logged.")
    rows = [[_moment(each, "unix_s"), Cell(clean(each.get("message", ""), 500))] for each in found.rows]
    columns = [Column("when", is_number=False), Column("warning", is_number=False)]
    title = (
        f"Warnings ({found.total:,})"
        if found.total == len(rows)
        else f"The first {len(rows)} of {found.total:,} warnings"
    )
    return Table(title, columns, rows, 10, f"all {len(rows)}")


def _bad_images(found: Rows) -> list[Block]:
    if not found.total:
        return []
    rows = [
        [cells.text(each.get("split", "")), cells.text(each.get("path", each.get("name", "")), 200),
         cells.text(each.get("reason", ""), 200)]
        for each in found.rows
    ]  # fmt: skip
    columns = [Column(each, is_number=False) for each in ("split", "image", "why it was left out")]
    return [Table(f"Images that could not be read ({found.total:,})", columns, rows, 5, f"{len(rows)} of them")]
