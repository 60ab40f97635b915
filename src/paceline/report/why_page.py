"""Build the page of `paceline why`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.core.statistics import Interval
from paceline.core.units import accuracy, number
from paceline.core.why_result import Cause, Difference, OutcomeGap, RerunResult, RerunRow, SpeedGap, WhyResult
from paceline.report import cells
from paceline.report.document import Block, KeyValueList, PageSection, Paragraph, ReportPage, Table, TableCell
from paceline.report.text import clean_text

_MAX_CAUSES = 8
_MAX_ALSO = 30
_SHOWN_SHARE = 0.01


def build_why_page(result: WhyResult) -> ReportPage:
    """Return the page; a terminal shows all of its blocks."""
    names = _short_names(result.a, result.b)
    blocks: list[Block] = []
    if result.speed is not None:
        blocks += [Paragraph(_speed_sentence(result.speed, result.causes, names)), _parts_table(result.speed, names)]
        blocks += _cause_blocks("What may explain the speed, the likeliest first", result.causes, names)
    if result.outcome is not None:
        blocks.append(Paragraph(_outcome_sentence(result.outcome, result.outcome_causes, names)))
        blocks += _cause_blocks("What may explain how it ended", result.outcome_causes, names)
    if result.rerun is not None:
        blocks += _rerun_blocks(result.rerun)
    if result.also_different:
        blocks.append(_also_table(result.also_different, names))
    blocks += [Paragraph(f"note: {clean_text(each, 600)}") for each in result.notes]
    verdict = result.speed.verdict if result.speed is not None else "unknown"
    return ReportPage(
        title=f"why {names[1]}",
        subtitle=[f"against {names[0]}"],
        status={"same": "no difference in speed"}.get(verdict, verdict),
        tone="warning" if verdict == "slower" else "good",
        sections=[PageSection("why", "Causes", blocks)],
        paceline=result.paceline,
        about="Why two runs differ",
        source="the result.json of both folders. Its numbers are rounded here only",
        summary=blocks,
    )


def _short_names(a: str, b: str) -> tuple[str, str]:
    names = [clean_text(Path(each).resolve().name, 40) for each in (a, b)]
    return (names[0], names[1]) if names[0] != names[1] else (clean_text(a, 60), clean_text(b, 60))


def _ratio_text(ratio: Interval) -> str:
    bounds = "" if ratio.low is None or ratio.high is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ratio.value:.2f}x{bounds}"


def _speed_sentence(speed: SpeedGap, causes: Sequence[Cause], names: tuple[str, str]) -> str:
    first, second = names
    took = f"{second} takes {_ratio_text(speed.ratio)} the time of {first} per {speed.unit}"
    if speed.verdict == "same":
        return f"{took}: no difference that exceeds the spread of steps and runs. Nothing is to be explained."
    if not causes:
        return f"{took}, but no recorded difference can explain it. Repeat both: the machine may have changed."
    return f"{took}. Likeliest cause: {_describe(causes[0].difference)}. {causes[0].reason}"


def _outcome_sentence(outcome: OutcomeGap, causes: Sequence[Cause], names: tuple[str, str]) -> str:
    first, second = names
    write = accuracy if outcome.metric == "top1" else number
    name = "top-1" if outcome.metric == "top1" else "loss"
    ended = f"{second} ended at {name} {write(outcome.b)}, {first} at {write(outcome.a)}"
    since = f" Their losses differ from step {outcome.first_step:,}." if outcome.first_step is not None else ""
    if outcome.verdict in ("same", "unknown"):
        return f"{ended}: no clear difference.{since}"
    if not causes:
        return f"{ended}, which is {outcome.verdict}, but no recorded difference can explain it.{since}"
    cause = f" Likeliest cause: {_describe(causes[0].difference)}. {causes[0].reason}"
    return f"{ended}, which is {outcome.verdict}.{since}{cause}"


def _describe(difference: Difference) -> str:
    before, after = (_value(each) for each in (difference.a, difference.b))
    if difference.name.startswith("code."):
        return f"the code of {clean_text(difference.name.removeprefix('code.'))}"
    return f"{clean_text(difference.name.removeprefix('argv.'))} {before} → {after}"


def _value(text: str | None) -> str:
    return "none" if text is None else clean_text(text, 60)


def _parts_table(speed: SpeedGap, names: tuple[str, str]) -> Table:
    parts = [each for each in speed.parts if max(each.a_s, each.b_s) >= _SHOWN_SHARE * max(speed.a_s, speed.b_s)]
    rows = [
        [
            TableCell(cells.stage_label(each.name)),
            cells.milliseconds_cell(each.a_s),
            cells.milliseconds_cell(each.b_s),
            cells.milliseconds_cell(each.b_s - each.a_s),
            cells.share_cell(each.share) if speed.verdict != "same" else cells.EMPTY_CELL,
        ]
        for each in parts
    ]
    whole = [
        TableCell("all"),
        cells.milliseconds_cell(speed.a_s),
        cells.milliseconds_cell(speed.b_s),
        cells.milliseconds_cell(speed.b_s - speed.a_s),
        cells.EMPTY_CELL,
    ]
    columns = cells.table_columns([""], [*names, "difference", "of the gap"])
    return Table(f"Where the gap is: time of rank 0 per {speed.unit}", columns, [*rows, whole], has_sum=True)


def _cause_blocks(title: str, causes: Sequence[Cause], names: tuple[str, str]) -> Iterator[Block]:
    if not causes:
        return
    rows = [
        [
            TableCell(clean_text(each.difference.name, 60)),
            TableCell(_value(each.difference.a)),
            TableCell(_value(each.difference.b)),
            TableCell(", ".join(cells.stage_label(name) for name in each.stages[:3])),
            TableCell(f"{each.score:.2f}", each.score),
        ]
        for each in causes[:_MAX_CAUSES]
    ]
    yield Table(title, cells.table_columns(["", *names, "in"], ["score"]), rows)


def _rerun_blocks(rerun: RerunResult) -> Iterator[Block]:
    def row(label: str, each: RerunRow) -> list[TableCell]:
        ratio = TableCell(_ratio_text(each.ratio), each.ratio.value) if each.ratio is not None else cells.EMPTY_CELL
        part = cells.share_cell(each.share) if each.share is not None else cells.EMPTY_CELL
        return [TableCell(clean_text(label, 80)), ratio, part, TableCell(clean_text(each.error, 120))]

    rows = [row(", ".join(each.differences), each) for each in rerun.rows]
    rows.append(row("all of these", rerun.whole))
    columns = cells.table_columns(["put back into the first run"], ["time over it", "of the gap"])
    columns += cells.table_columns([""])
    yield Table(f"Measured again, {rerun.pairs} pairs of {rerun.steps} steps each", columns, rows)
    if rerun.left:
        left = clean_text(", ".join(rerun.left), 400)
        yield Paragraph(f"Not explained by what can be put back: {left}.")


def _also_table(differences: Sequence[Difference], names: tuple[str, str]) -> Block:
    rows = [
        (clean_text(each.name, 60), TableCell(f"{_value(each.a)} → {_value(each.b)}"))
        for each in differences[:_MAX_ALSO]
    ]
    left = len(differences) - len(rows)
    return KeyValueList(rows, f"Also different{f' (and {left} more)' if left > 0 else ''}")
