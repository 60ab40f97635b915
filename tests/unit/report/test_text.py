"""Names, moments and values from outside as a reader sees them."""

import math

import pytest

from paceline.report import text


def test_a_time_is_utc_and_out_of_range_a_number():
    assert text.format_time(1_795_275_073.1) == "2026-11-21 15:31 UTC"
    assert text.format_time(1e300).startswith("1")


def test_text_from_outside_is_one_printable_line_of_limited_length():
    assert text.clean_text("a\nb\x1b[31m\u202e\udcff") == r"a\nb\x1b[31m\u202e\udcff"
    assert text.clean_text("x" * 500) == "x" * 159 + "…"
    assert text.clean_lines("a: 1\n\tb\x00\r\nc") == "a: 1\n    b\\x00\nc"


@pytest.mark.parametrize("value", [None, True, "1", math.nan, math.inf, [], 10**400])
def test_only_finite_numbers_are_numbers(value):
    assert text.finite_or_none(value) is None
