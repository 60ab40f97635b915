"""Render a report as Markdown: bars become tables, and each curve of a chart becomes a row."""

import re
from collections.abc import Iterable, Iterator, Sequence

from paceline.core.units import number, share
from paceline.report.blocks import (
    Bar,
    BarRow,
    Bars,
    Block,
    Cell,
    Charts,
    Code,
    Command,
    Facts,
    Gallery,
    HeatMap,
    Page,
    Paragraph,
    Table,
)

# Replaced by HTML entities, which every renderer shows as text; not all renderers honour backslashes.
_SPECIAL = re.compile(r"[&<>|`\[\]*~\\]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_MAX_MATRIX = 20


def to_markdown(page: Page) -> str:
    """Return a page as GitHub-flavoured Markdown."""
    lines = [f"# {escaped(page.title)}", "", f"**{escaped(page.status)}** · {escaped(' · '.join(page.subtitle))}", ""]
    lines += [f"- could not be read: {escaped(problem)}" for problem in page.problems]
    rows = [[figure.label, figure.cell.text, figure.note] for figure in page.figures]
    lines += ["", *_table(["figure", "value", "note"], rows)]
    if page.health:
        lines += ["", "## Health", ""]
        lines += [
            f"- **{escaped(each.title)}** ({each.severity}): {escaped(f'{each.evidence} {each.advice}')}"
            for each in page.health
        ]
    if page.verdict is not None:
        bottleneck = page.verdict
        lines += ["", f"## Bottleneck: {escaped(bottleneck.bottleneck)}", ""]
        lines += [escaped(" ".join(filter(None, (bottleneck.evidence, bottleneck.ceiling, bottleneck.advice))))]
        lines += ["", *_fenced(bottleneck.command, "sh")] if bottleneck.command else []
    for section in page.sections:
        lines += ["", f"## {escaped(section.title)}"]
        for block in section.blocks:
            if not (isinstance(block, Bars) and block.has_table):
                lines += ["", *_block(block)]
    return "\n".join([*lines, "", f"Written by paceline {page.paceline}.", ""])


def escaped(text: str) -> str:
    """Return text with everything that Markdown or HTML would interpret as character references."""
    return _SPECIAL.sub(lambda match: f"&#{ord(match[0])};", text)


def table_lines(table: Table) -> list[str]:
    """Return the lines of a table without its title."""
    return _table([column.title for column in table.columns], [[_text(cell) for cell in row] for row in table.rows])


def _text(cell: Cell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text


def _block(block: Block) -> Iterator[str]:
    match block:
        case Paragraph():
            yield escaped(block.text)
        case Command():
            yield from _fenced(block.text, "sh")
        case Code():
            yield from [f"**{escaped(block.title)}**", "", *_fenced(block.text, "yaml")]
        case Table():
            rows = [[_text(cell) for cell in row] for row in block.rows]
            yield from _titled(block.title, [column.title for column in block.columns], rows)
        case Facts():
            yield from _titled(block.title, ["", ""], [[name, _text(cell)] for name, cell in block.rows])
        case Bar() | Bars() | Charts() | HeatMap() | Gallery():
            yield from _drawing(block)


def _drawing(block: Bar | Bars | Charts | HeatMap | Gallery) -> Iterator[str]:
    match block:
        case Bar():
            rows = [[segment.name, segment.text, share(segment.share)] for segment in block.parts]
            yield from _titled(
                f"{block.title} ({block.note})" if block.note else block.title, ["part", "", "share"], rows
            )
        case Bars():
            parts = list(dict.fromkeys(segment.name for row in block.rows for segment in row.parts))
            yield from _titled(block.title, ["", *parts, "all"], [_bar(row, parts) for row in block.rows])
        case Charts():
            yield from _table(["curve", "unit", "first", "last", "lowest", "highest"], _curves(block))
        case HeatMap():
            yield from _matrix(block)
        case Gallery():
            rows = [[each.true, each.predicted, ", ".join([*each.details, each.name])] for each in block.pictures]
            yield from _titled(block.title, ["true", "predicted", "image"], rows)


def _bar(row: BarRow, names: Sequence[str]) -> list[str]:
    texts = {segment.name: segment.text for segment in row.parts}
    return [row.name, *(texts.get(name, "") for name in names), row.text]


def _curves(block: Charts) -> list[list[str]]:
    rows = []
    for chart in block.charts:
        for line in chart.lines:
            ys = [y for _, y in line.points]
            name = chart.title if line.name in (chart.title, "") else f"{chart.title}, {line.name}"
            figures = [number(y, 4) for y in (ys[0], ys[-1], min(ys), max(ys))] if ys else [""] * 4
            rows.append([name, chart.y_label, *figures])
    return rows


def _matrix(heat: HeatMap) -> Iterator[str]:
    if len(heat.names) > _MAX_MATRIX:
        yield "The confusion matrix is in the HTML and JSON reports."
        return
    rows = [
        [name, *(f"{count:,}" if count else "" for count in counts)]
        for name, counts in zip(heat.names, heat.counts, strict=True)
    ]
    yield from _titled(heat.title, ["", *heat.names], rows)


def _titled(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    if title:
        yield from [f"**{escaped(title)}**", ""]
    yield from _table(headings, rows)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(map(escaped, headings))} |", f"|{' --- |' * len(headings)}"]
    return [*lines, *(f"| {' | '.join(map(escaped, row))} |" for row in rows)]


def _fenced(text: str, language: str) -> list[str]:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", text, fence]
