"""A cell is a text that no spreadsheet runs and no terminal obeys, and gives the same text back."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.csv_cells import from_cell, to_cell

CELLS = {
    "cat": "cat",
    "C:\\new": "C:\\new",
    "-1": "-1",
    "Shot 3.04\u202fPM": "Shot 3.04\u202fPM",
    "+2.5": "+2.5",
    "": "",
    "=1+1": "'=1+1",
    "+cmd|calc": "'+cmd|calc",
    "-1+1": "'-1+1",
    "@SUM(1)": "'@SUM(1)",
    "\uff1d1": "'\uff1d1",
    "\t=1": "'\\t=1",
    "a\r\nb": "'a\\r\\nb",
    "\x1b[2J": "'\\x1b[2J",
    "\u202egnp": "'\\u202egnp",
    "\udcff": "'\\udcff",
    "'quoted'": "''quoted'",
    "=C:\\new": "'=C:\\\\new",
}


@pytest.mark.parametrize("text", CELLS)
def test_formulas_and_control_characters_are_marked(text: str) -> None:
    assert to_cell(text) == CELLS[text]
    assert from_cell(CELLS[text]) == text


@given(st.text(st.characters(codec=None)))
def test_every_text_comes_back_and_is_printable(text: str) -> None:
    cell = to_cell(text)
    assert from_cell(cell) == text
    assert not any(unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") for character in cell)
