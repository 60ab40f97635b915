"""Tables in a terminal: numbers are whole, however narrow it is."""

import re

import pytest

from paceline.cli.tables import print_table

HEADINGS = ("rung", *(f"stage {letter}" for letter in "abcdefgh"))
ROWS = [["channels last", *(f"{1000 + index:,}.25" for index in range(8))], ["DataParallel", *["-"] * 8]]


def test_columns_without_room_follow_in_another_table_with_the_names(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    print_table("a step", HEADINGS, ROWS)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 60 and "…" not in out
    assert len(re.findall(r"│ rung ", out)) > 1 and out.count("a step") == 1
    assert re.findall(r"1,\d+\.25", out) == ROWS[0][1:]


def test_all_columns_that_name_a_row_are_repeated(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    rows = [["128", "0ep", "92.94 % (92.75 to 93.12)", "416"], ["128", "5ep", "93.94 % (93.75 to 94.12)", "420"]]
    print_table("batches", ("batch", "warm-up", "top-1", "images/s"), rows, text_columns=("warm-up",), num_names=2)
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "128 0ep 92.94 %" in out and "128 0ep 416" in out and "128 5ep 420" in out


def test_a_table_that_fits_is_not_split(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    print_table("a step", HEADINGS, ROWS)
    assert capsys.readouterr().out.count("│ rung ") == 1


def test_a_name_is_broken_if_that_saves_a_table(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "26")
    print_table("t", ("rung", "stage a"), [["DataParallel", "1.25"]])
    out = capsys.readouterr().out
    assert out.count("stage a") == 1 and "DataParall" in out and "el " in out


def test_a_column_that_fits_no_terminal_is_still_shown(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_table("t", ("run", "accuracy", "settings"), [["/a/very/long/path/to/a/run", "97.22 %", "x" * 40]],
                text_columns=("settings",))  # fmt: skip
    assert "97.22 %" in capsys.readouterr().out
