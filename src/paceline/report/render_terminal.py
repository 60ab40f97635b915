"""Render a report in a terminal: its key figures, bottleneck, findings and summary; charts and images are omitted."""

import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TextIO

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from paceline.core.units import share
from paceline.report.document import (
    BarChart,
    BarSegment,
    Block,
    Brief,
    BriefRow,
    ChartRow,
    CodeBlock,
    Command,
    Fold,
    Gallery,
    HeatMap,
    KeyValueList,
    Paragraph,
    ReportPage,
    StackedBar,
    Table,
    TableCell,
    TableColumn,
    Tone,
)
from paceline.report.text import clean_lines

# Characters of a text column from which its words may be broken, of a column of sentences, and of a name if that
# saves a table.
_MAX_WORD_WIDTH: Final = 16
_MIN_SENTENCE_WIDTH: Final = 28
_MIN_NAME_WIDTH: Final = 8
_BAR_WIDTH: Final = 40
# A brief: the width of labels and of its bar, the marks of tones, and the shades of a bar's parts.
_MIN_LABEL_WIDTH: Final = 10
_LABEL: Final = re.compile(r"  [a-z][a-z ]*?(?=  )")
_PIECE_GAP: Final = "   "
_BRIEF_BAR_WIDTH: Final = 24
_MARKS: Final[dict[Tone, str]] = {"good": "✓", "warning": "!", "bad": "✗"}
_PLAIN_MARKS: Final[dict[Tone, str]] = {"good": "ok:", "warning": "note:", "bad": "failed:"}
_TONE_STYLES: Final[dict[Tone, str]] = {"good": "bold green", "warning": "bold yellow", "bad": "bold red"}
_SHADES: Final = "▓░▒█"
_PLAIN_SHADES: Final = "#-=+"
_REST: Final = "·"
_PLAIN_REST: Final = "."


def print_page(page: ReportPage, out: TextIO | None = None) -> None:
    """Print the title, status and summary of a page to `out`, by default to standard output."""
    console = _build_console(out)
    console.print(clean_lines(f"{page.title}: {page.status}"), style="bold", soft_wrap=True)
    facts, summary = [figure.row for figure in page.figures], page.summary
    commands: list[Block] = []
    if page.verdict is not None:
        commands = [Paragraph("To try:"), Command(page.verdict.command)] if page.verdict.command else []
        advice = f"To try: {page.verdict.advice}." if page.verdict.advice else ""
        texts = (f"{page.verdict.bottleneck}.", page.verdict.evidence, page.verdict.ceiling, advice)
        facts.append(("bottleneck", TableCell(" ".join(filter(None, texts)))))
    match page.summary:
        case [KeyValueList(title="") as more, *summary]:
            facts += more.rows
    blocks = (
        *([Paragraph(" · ".join(page.subtitle))] if page.subtitle else []),
        *(Paragraph(f"could not be read: {problem}") for problem in page.problems),
        KeyValueList(facts),
        *commands,
        *([Paragraph(f"to look into: {', '.join(page.notices)}")] if page.notices else []),
        KeyValueList([(each.title, TableCell(f"{each.evidence} {each.advice}")) for each in page.health], "health"),
        *summary,
    )
    for block in blocks:
        _print_block(console, block)


def print_brief(brief: Brief, *, is_ascii: bool = False) -> None:
    """Print a brief: a headline and aligned rows, wrapped between pieces on a terminal, and plain lines elsewhere.

    `is_ascii`, or an encoding other than UTF, replaces other characters than ASCII.
    """
    console = _build_console()
    is_plain = is_ascii or not console.encoding.lower().startswith("utf")
    width = console.width if console.is_terminal else 0
    mark = (_PLAIN_MARKS if is_plain else _MARKS)[brief.tone]
    separator = " - " if is_plain else " · "
    what, *more = (_to_ascii(each) if is_plain else each for each in map(clean_lines, brief.headline))
    first, *rest = _fill([f"{mark} {what}", *more], separator, width, 2)
    # At the right end of the headline if there is room, else on its own line unless a row names it too.
    place = _to_ascii(clean_lines(brief.place)) if is_plain else clean_lines(brief.place)
    if place and not rest and len(first) + 2 + len(place) <= width:
        first = f"{first:{width - len(place)}}{place}"
    elif place and not any(brief.place in line[0] for row in brief.rows for line in row.lines):
        rest.append(f"  {place}")
    lines = [first, *rest, ""]
    label_width = max([_MIN_LABEL_WIDTH, *(len(row.label) for row in brief.rows)])
    for row in brief.rows:
        lines += _brief_lines(row, label_width, width, is_plain=is_plain)
    for number, line in enumerate(lines):
        style = _TONE_STYLES[brief.tone] if number == 0 else ""
        label = _LABEL.match(line) if number else None
        text = Text(line)
        if label:
            text.stylize("bold", *label.span())
        elif style:
            text.stylize(style, 0, len(mark))
            text.stylize("bold", len(mark))
        console.print(text, soft_wrap=True)


def _brief_lines(row: BriefRow, label_width: int, width: int, *, is_plain: bool) -> Iterator[str]:
    margin = 2 + label_width + len(_PIECE_GAP)
    lines = [list(line) for line in row.lines]
    if row.bar:
        marks = itertools.cycle(_PLAIN_SHADES if is_plain else _SHADES)
        rest = _PLAIN_REST if is_plain else _REST
        keyed = [(rest if each is row.bar[-1] else next(marks), each) for each in row.bar]
        texts = [f"{mark} {text}" for (mark, _), text in zip(keyed, lines[0], strict=True)]
        drawn = "".join(mark * length for (mark, _), length in zip(keyed, _bar_lengths(row.bar), strict=True))
        lines = [[drawn, *texts]]
    command_width = max((len(line[0]) for line in lines), default=0) if row.is_command else 0
    label = row.label
    for number, line in enumerate(lines):
        pieces = [_to_ascii(piece) if is_plain else piece for piece in map(clean_lines, line)]
        if row.is_command:
            text = f"{pieces[0]:{command_width}}   {pieces[1]}" if len(pieces) > 1 else pieces[0]
            # A command is never broken or cut; what it does is left out if it does not fit.
            filled = [text if not width or margin + len(text) <= width else pieces[0]]
        elif row.is_cut and width:
            filled = textwrap.wrap(
                pieces[0], width - margin, max_lines=1 if number else 2, placeholder=" ..." if is_plain else " …"
            )
        else:
            filled = list(_fill(pieces, _PIECE_GAP, width - margin if width else 0, 0))
        for text in filled:
            yield f"  {label:{label_width}}{_PIECE_GAP}{text}".rstrip()
            label = ""


def _fill(pieces: Sequence[str], separator: str, width: int, indent: int) -> Iterator[str]:
    """Yield lines of whole pieces, at most `width` characters long where pieces allow it; 0 is one line."""
    line = ""
    for piece in pieces:
        if not width or len(line) + len(separator) + len(piece) <= width:
            line = f"{line}{separator}{piece}" if line.strip() else f"{line}{piece}"
            continue
        if line.strip():
            yield line
        # A piece that is longer than a line is broken between words.
        *full, line = textwrap.wrap(piece, width, initial_indent=" " * indent, subsequent_indent=" " * indent)
        yield from full
    yield line


def _bar_lengths(parts: Sequence[BarSegment]) -> list[int]:
    """Return the cells of each part of a bar; rounded at the ends, so that they sum to the whole."""
    ends = [round(_BRIEF_BAR_WIDTH * sum(each.share for each in parts[: index + 1])) for index in range(len(parts))]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def _to_ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("ascii")


def print_blocks(*blocks: Block) -> None:
    """Print blocks. Every character that is not printable is escaped: texts may come from a recipe or a file."""
    console = _build_console()
    for block in blocks:
        _print_block(console, block)


def _build_console(out: TextIO | None = None) -> Console:
    return Console(file=out, highlight=False, markup=False, emoji=False)


def _print_block(console: Console, block: Block) -> None:
    match block:
        case Paragraph():
            # The terminal would break words; in a file a sentence stays one line.
            console.print(clean_lines(block.text), soft_wrap=not console.is_terminal)
        case Command():
            console.print(f"  {clean_lines(block.text)}", soft_wrap=True)
        case KeyValueList():
            _print_facts(console, block)
        case Table():
            _print_table(console, block)
        case StackedBar():
            columns = [TableColumn("part", is_number=False), TableColumn("time"), TableColumn("share")]
            rows = [[TableCell(each.name), TableCell(each.text), TableCell(share(each.share))] for each in block.parts]
            _print_table(console, Table(block.title, columns, rows))
        case BarChart():
            _print_bars(console, block)
        case Fold():
            for each in block.blocks:
                _print_block(console, each)
        case ChartRow() | HeatMap() | Gallery() | CodeBlock():
            pass


def _print_title(console: Console, title: str) -> None:
    if title:  # not as the table's own, which would be folded to the width of the table
        console.print(clean_lines(title), style="bold", soft_wrap=True)


def _print_facts(console: Console, facts: KeyValueList) -> None:
    if not facts.rows:
        return
    _print_title(console, facts.title)
    table = RichTable(box=box.ROUNDED, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, cell in facts.rows:
        table.add_row(clean_lines(name), _cell_text(cell, " "))
    console.print(table)


def _print_bars(console: Console, chart: BarChart) -> None:
    if not chart.rows:
        return
    _print_title(console, chart.title)
    lengths = [sum(segment.share for segment in row.parts) for row in chart.rows]
    names = [clean_lines(row.name) for row in chart.rows]
    width, longest = max(map(len, names)), max(lengths) or 1.0
    for name, row, length in zip(names, chart.rows, lengths, strict=True):
        bar = "█" * max(1, round(_BAR_WIDTH * length / longest))
        console.print(f"  {name:{width}} {bar} {clean_lines(row.text)}", soft_wrap=True)


def _print_table(console: Console, table: Table) -> None:
    """Print a table whose numbers are never cut.

    Columns that do not fit the terminal follow in further tables, which repeat those that identify a row. A column
    without values is left out.
    """
    rows = table.rows[: table.num_open or None]
    used = [
        index
        for index in range(len(table.columns))
        if index < table.num_names or not rows or any(row[index].text for row in rows)
    ]
    columns = [table.columns[index] for index in used]
    layouts = []
    # Break headings, put notes below values and break names only if that saves a table.
    for name_width, between, breaks_headings in itertools.product(
        (_MAX_WORD_WIDTH, _MIN_NAME_WIDTH), (" ", "\n"), (False, True)
    ):
        texts = [[_cell_text(row[index], between) for index in used] for row in rows]
        headings, widths = [], []
        for column, cells in zip(columns, zip(*texts, strict=True) if texts else [()] * len(columns), strict=True):
            width = _min_width(column, cells)
            headings.append(_break_heading(column, width) if breaks_headings else clean_lines(column.title))
            widths.append(max(width, _longest(headings[-1].split("\n"))) if column.is_number else width)
        widths[0] = widths[0] if columns[0].is_number else min(widths[0], name_width)
        layouts.append((list(_split_columns(widths, console.width, table.num_names)), [headings, *texts]))
    parts, texts = min(layouts, key=lambda layout: len(layout[0]))
    _print_title(console, table.title)
    for part in parts:
        console.print(_build_part(part, columns, texts, has_sum=table.has_sum))
    if len(rows) < len(table.rows):
        console.print(f"and {len(table.rows) - len(rows):,} {table.more}", soft_wrap=True)


def _break_heading(column: TableColumn, width: int) -> str:
    heading = clean_lines(column.title)
    return "\n".join(textwrap.wrap(heading, max(1, width))) if column.is_number else heading


def _build_part(
    part: Sequence[int], columns: Sequence[TableColumn], texts: Sequence[Sequence[str]], *, has_sum: bool
) -> RichTable:
    """Return the columns `part` of a table; the first row of `texts` has the headings."""
    headings, *rows = texts
    built = RichTable(box=box.ROUNDED, show_header=any(headings))
    for index in part:
        is_number = columns[index].is_number
        built.add_column(
            headings[index],
            justify="right" if is_number else "left",
            style="bold" if index == 0 else "",
            no_wrap=is_number,
            overflow="fold",
        )
    for number, row in enumerate(rows, start=1):
        built.add_row(*(row[index] for index in part), end_section=has_sum and number == len(rows) - 1)
    return built


def _cell_text(cell: TableCell, between: str) -> str:
    return clean_lines(f"{cell.text}{between}({cell.note})" if cell.note else cell.text)


def _min_width(column: TableColumn, texts: Iterable[str]) -> int:
    """Return the minimum width of a column: the longest line of numbers, the longest word of text up to a limit."""
    heading = _longest(clean_lines(column.title).split())
    if column.is_number:
        return max(heading, _longest(line for text in texts for line in text.split("\n")))
    if column.is_wide:
        return max(heading, min(_MIN_SENTENCE_WIDTH, _longest(texts)))
    return min(_MAX_WORD_WIDTH, max(heading, _longest(word for text in texts for word in text.split())))


def _longest(texts: Iterable[str]) -> int:
    return max(map(len, texts), default=0)


def _split_columns(widths: Sequence[int], room: int, num_names: int) -> Iterator[list[int]]:
    """Yield the column indices of each table; the first `num_names` are in all of them."""
    # Borders and padding: three characters per column, and one at the end.
    names_width = sum(widths[:num_names]) + 3 * num_names + 1
    columns, used = [*range(num_names)], names_width
    for index, width in enumerate(widths[num_names:], start=num_names):
        if used + width + 3 > room and len(columns) > num_names:
            yield columns
            columns, used = [*range(num_names)], names_width
        columns.append(index)
        used += width + 3
    yield columns
