"""Reports in a terminal: numbers are whole however narrow it is, and nothing in a text reaches it unescaped."""

import re
from collections.abc import Sequence

import pytest

from paceline.report.document import (
    BarChart,
    BarRow,
    BarSegment,
    Chart,
    ChartRow,
    Command,
    KeyFigure,
    KeyValueList,
    Paragraph,
    ReportPage,
    Table,
    TableCell,
    TableColumn,
)
from paceline.report.render_terminal import print_blocks, print_page

HEADINGS = ("rung", *(f"stage {letter}" for letter in "abcdefgh"))
ROWS = [["channels last", *(f"{1000 + index:,}.25" for index in range(8))], ["DataParallel", *["-"] * 8]]


def build_table(headings: Sequence[str], rows: Sequence[Sequence[str]], num_names: int = 1) -> Table:
    columns = [TableColumn(heading, is_number=index >= num_names) for index, heading in enumerate(headings)]
    return Table("a step", columns, [[*map(TableCell, row)] for row in rows], num_names=num_names)


@pytest.fixture
def width(monkeypatch: pytest.MonkeyPatch):
    return lambda columns: monkeypatch.setenv("COLUMNS", str(columns))


def test_columns_without_room_follow_in_another_table_with_the_names(width, capsys) -> None:
    width(60)
    print_blocks(build_table(HEADINGS, ROWS))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 60 and "…" not in out
    assert len(re.findall(r"│ rung ", out)) > 1 and out.count("a step") == 1
    assert re.findall(r"1,\d+\.25", out) == ROWS[0][1:]


def test_all_columns_that_name_a_row_are_repeated(width, capsys) -> None:
    width(50)
    rows = [["128", "0ep", "92.94 % (92.75 to 93.12)", "416"], ["128", "5ep", "93.94 % (93.75 to 94.12)", "420"]]
    print_blocks(build_table(("batch", "warm-up", "top-1", "images/s"), rows, num_names=2))
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "128 0ep 92.94 %" in out and "128 0ep 416" in out and "128 5ep 420" in out


def test_a_table_that_fits_is_not_split(width, capsys) -> None:
    width(200)
    print_blocks(build_table(HEADINGS, ROWS))
    assert re.search(r"│ rung .* stage h", capsys.readouterr().out.replace("\n", " "))


def test_intervals_go_below_values_if_that_saves_a_table(width, capsys) -> None:
    cells = [TableCell("1"), TableCell("1,234", note="1,200 to 1,260"), TableCell("93.1 %", note="92.0 to 94.2")]
    table = Table("", [TableColumn(each) for each in ("ranks", "images/s", "efficiency")], [cells])
    width(80)
    print_blocks(table)
    assert "1,234 (1,200 to 1,260)" in capsys.readouterr().out
    width(50)
    print_blocks(table)
    out = capsys.readouterr().out
    assert out.count("ranks") == 1 and re.search(r"1,234 .* 93.1 %.*\n.*\(1,200 to 1,260\) .*\(92.0 to 94.2\)", out)


def test_a_name_is_broken_if_that_saves_a_table(width, capsys) -> None:
    width(22)
    print_blocks(build_table(("rung", "stage a"), [["DataParallel", "1.25"]]))
    out = capsys.readouterr().out
    assert out.count("stage a") == 1 and "DataPara" in out and "llel " in out


def test_a_column_that_fits_no_terminal_is_still_shown(width, capsys) -> None:
    width(20)
    columns = [TableColumn("run", is_number=False), TableColumn("accuracy"), TableColumn("settings", is_number=False)]
    print_blocks(Table("t", columns, [[*map(TableCell, ("/a/very/long/path/to/a/run", "97.22 %", "x" * 40))]]))
    assert "97.22 %" in capsys.readouterr().out


def test_a_column_without_values_and_rows_beyond_the_limit_are_left_out(width, capsys) -> None:
    width(80)
    columns = [TableColumn("ranks"), TableColumn("top-1"), TableColumn("images/s")]
    rows = [[TableCell(str(ranks)), TableCell(""), TableCell("100")] for ranks in range(1, 6)]
    print_blocks(Table("", columns, rows, num_open=3, more="more ranks"))
    out = capsys.readouterr().out
    assert "top-1" not in out and out.count("100") == 3 and "and 2 more ranks" in out


def test_bars_are_drawn_with_characters_and_charts_are_not(capsys) -> None:
    rows = [
        BarRow("a", [BarSegment("a", 0.5, "50", "c-kept")], "50"),
        BarRow("bb", [BarSegment("bb", 1.0, "100", "c-kept")], "100"),
    ]
    print_blocks(BarChart("images/s", rows), ChartRow([Chart("a curve", "x", "y", [])]))
    assert capsys.readouterr().out == f"images/s\n  a  {'█' * 20} 50\n  bb {'█' * 40} 100\n"


def test_no_text_reaches_the_terminal_unescaped(capsys) -> None:
    evil = "\x1b]0;title\x07[bold]:smile:\udcff"
    table = Table(evil, [TableColumn(evil, is_number=False)], [[TableCell(evil, note=evil)]])
    facts = KeyValueList([(evil, TableCell(evil))], evil)
    page = ReportPage(
        title=evil, subtitle=[evil], status=evil, tone="good", figures=[KeyFigure(evil, TableCell(evil), evil)],
        verdict=None, notices=[evil], problems=[evil], sections=(), paceline="1",
        summary=[table, facts, Paragraph(evil), Command(evil)],
    )  # fmt: skip
    print_page(page)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and "\udcff" not in out
    assert r"\x1b]0;title\x07[bold]:smile:\udcff" in out


def test_a_command_is_one_line_however_narrow_the_terminal_is(width, capsys) -> None:
    width(30)
    command = "paceline train digits optim.lr=0.1 train.epochs=3 --ranks 2"
    print_blocks(Command(command))
    assert f"  {command}\n" == capsys.readouterr().out
