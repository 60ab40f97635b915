"""`core.units`: durations as people write them, the steps they amount to, and amounts as people read them."""

import math
from typing import get_args

import pytest

from paceline.core import units
from paceline.core.units import SECONDS, Duration, Unit, count

UNITS = get_args(Unit)
BAD = [
    "", " ", "5", "ep", "5 epochs", "5EP", "5m", "-5ep", "+5ep", ".5ep", "5.ep", "1e3st", "5ep5", "5ep 3st", "infep",
    "nanep", "5,000img", "5_000st", "9" * 400 + "st", "\x005ep", None, 5, 5.0, True, ["5ep"], {"value": 5},
]  # fmt: skip


def test_there_are_the_seven_units_of_the_manual():
    assert UNITS == ("ep", "st", "img", "%", "s", "min", "h")


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("text", "value"), [("5", 5.0), ("0", 0.0), ("0.5", 0.5), ("1234567", 1234567.0)])
def test_parse_reads_a_number_and_a_unit(text, value, unit):
    assert Duration.parse(text + unit) == Duration(value, unit)


@pytest.mark.parametrize("text", ["5ep", " 5ep", "5ep\n", "5 ep", "5  ep", "5.0ep", "05ep"])
def test_parse_ignores_space_and_needless_digits(text):
    assert Duration.parse(text) == Duration(5.0, "ep")


@pytest.mark.parametrize("text", BAD)
def test_parse_refuses_anything_else_with_the_fix(text):
    with pytest.raises(ValueError, match="is not a duration") as caught:
        Duration.parse(text)
    expected = f"{text!r} is not a duration (write 5ep, 500st, 50000img, 10%, 90s, 30min or 2h)"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (Duration(5, "ep"), "5ep"),
        (Duration(5.0, "ep"), "5ep"),
        (Duration(0.5, "%"), "0.5%"),
        (Duration(10, "st"), "10st"),
        (Duration(1e6, "img"), "1000000img"),
        (Duration(1e20, "img"), "100000000000000000000img"),
    ],
)
def test_text_is_as_short_as_a_person_would_write_it(duration, text):
    assert str(duration) == text


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    "value", [0.0, 1.0, 0.1, 1 / 3, 33.33333, 100_000.5, 1_234_567.5, 999_999.9, 1e-5, 2.0**53, 1e22, 1e-300]
)
def test_text_reads_back_to_an_equal_duration(value, unit):
    """A run is resumed from the text in its recipe.yaml, so a rounded digit would be another recipe."""
    assert Duration.parse(str(Duration(value, unit))) == Duration(value, unit)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("3ep", 60), ("0.5ep", 10), ("0ep", 0), ("7st", 7), ("6400img", 100), ("96img", 2), ("10%", 20), ("100%", 200),
        ("0.2%", 0), ("0.03ep", 1),
    ],
)  # fmt: skip
def test_steps_of_every_amount_of_training_are_the_nearest_whole_number(text, steps):
    assert Duration.parse(text).steps(steps_per_epoch=20, batch_size=64, total_steps=200) == steps


def test_every_unit_is_either_time_or_has_steps():
    amounts = [unit for unit in UNITS if not Duration(1, unit).is_time]
    assert amounts == ["ep", "st", "img", "%"]
    for unit in amounts:
        assert isinstance(Duration(1, unit).steps(steps_per_epoch=20, batch_size=64, total_steps=200), int)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("1.5min", 90.0), ("2h", 7200.0), ("0s", 0.0)])
def test_seconds_of_every_time_unit(text, seconds):
    assert Duration.parse(text).is_time
    assert Duration.parse(text).seconds == seconds


@pytest.mark.parametrize("unit", SECONDS)
def test_steps_of_a_time_unit_are_an_assertion_error(unit):
    with pytest.raises(AssertionError, match=f"1{unit} has no number of steps"):
        Duration(1, unit).steps(steps_per_epoch=20, batch_size=64, total_steps=200)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 steps"), (1, "1 step"), (1.0, "1 step"), (2, "2 steps"), (1.5, "1.5 steps"), (1234, "1,234 steps")],
)
def test_count_puts_a_noun_into_the_plural(number, text):
    assert count(number, "step") == text


@pytest.mark.parametrize(
    "value, text",
    [(0, "0"), (3, "3"), (1234567, "1,234,567"), (2713.4481, "2,713"), (12.34, "12.3"), (0.012345, "0.0123"),
     (-2.1, "-2.10"), (1e-9, "1.00e-09"), (math.nan, "nan"), (math.inf, "inf"), (99.96, "99.96")],
)  # fmt: skip
def test_a_number_has_three_digits_or_all_before_its_point(value, text):
    assert units.number(value) == (text if value != 99.96 else "100.0")


@pytest.mark.parametrize(
    "value, text",
    [(0.0, "0 s"), (1.7e-6, "1.70 µs"), (0.0312, "31.2 ms"), (4.699, "4.70 s"), (41.2, "41.2 s"), (59.94, "59.9 s"),
     (59.96, "1 min 00 s"), (3599.7, "1 h 00 min"),
     (77.6, "1 min 18 s"), (441.0, "7 min 21 s"),
     (11_100.0, "3 h 05 min"), (-1.7, "-1.70 s"), (-90.0, "-1 min 30 s"), (math.inf, "inf s")],
)  # fmt: skip
def test_seconds_are_formatted_in_the_unit_that_fits(value, text):
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    "value, text",
    [(0.0, "0 s"), (4.7, "5 s"), (59.7, "1 min 00 s"), (65.0, "1 min 05 s"), (3599.7, "1 h 00 min"),
     (3780.0, "1 h 03 min"), (363_600.0, "101 h 00 min")],
)  # fmt: skip
def test_a_duration_on_a_clock_has_whole_seconds(value, text):
    assert units.duration(value) == text


@pytest.mark.parametrize("value, text", [(0.0, "0"), (33.71, "33.7"), (999.6, "999.6"), (1593.4, "1,593")])
def test_a_rate_has_three_digits_and_no_noise(value, text):
    assert units.per_second(value) == (text if value != 999.6 else "1,000")


@pytest.mark.parametrize("value, text", [(0.0, "0.0 %"), (0.0001, "< 0.1 %"), (0.9934, "99.3 %"), (1.0, "100.0 %")])
def test_a_positive_share_is_not_rounded_to_zero(value, text):
    assert units.share(value) == text


@pytest.mark.parametrize(
    "value, text", [(512, "512 bytes"), (1000, "1 kB"), (8_433_664, "8.43 MB"), (2e15, "2,000 TB")]
)
def test_bytes_are_formatted_in_decimal_units(value, text):
    assert units.size(value) == text


@pytest.mark.parametrize("value, text", [(9.06e12, "9.06 TFLOP"), (3.34e9, "3.34 GFLOP"), (2.5e5, "0.250 MFLOP")])
def test_flops_are_formatted_with_a_prefix(value, text):
    assert units.flops(value) == text


def test_an_accuracy_has_two_digits_after_its_point():
    assert units.accuracy(0.97216) == "97.22 %" and units.accuracy(math.nan) == "nan"
