"""`core.statistics`: confidence intervals of means, ratios, products and differences."""

import math
import random

import pytest

from paceline.core.statistics import (
    Interval,
    difference_interval,
    mean_interval,
    product_interval,
    ratio_interval,
    resampled_interval,
)


def test_the_interval_of_a_mean_is_students() -> None:
    """Against Student's table: the 97.5 % quantile with two degrees of freedom is 4.3027."""
    found = mean_interval([1.0, 2.0, 3.0])
    half = 4.302652729749464 / math.sqrt(3)
    assert (found.value, found.n) == (2.0, 3)
    assert found.low == pytest.approx(2 - half, rel=1e-12) and found.high == pytest.approx(2 + half, rel=1e-12)


def test_a_single_measurement_has_no_bounds() -> None:
    alone = mean_interval([5.0])
    assert alone == Interval(value=5.0, n=1)
    assert not alone.is_above(1.0) and not alone.is_below(9.0)
    assert difference_interval([2.0], [1.0, 1.5]).low is None
    assert product_interval([alone, mean_interval([1.0, 2.0])]).low is None


def test_load_during_a_pair_does_not_change_its_ratio() -> None:
    below = [100.0, 50.0, 10.0]
    found = ratio_interval([2 * each for each in below], below)
    assert found.value == pytest.approx(2) and found.low == pytest.approx(2) and found.high == pytest.approx(2)
    assert found.is_above(1.9) and found.is_below(2.1) and not found.is_above(2.1)


def test_a_ratio_and_its_inverse_have_inverse_bounds() -> None:
    one, other = [3.0, 4.0, 5.0], [2.0, 2.5, 2.0]
    up, down = ratio_interval(one, other), ratio_interval(other, one)
    assert up.value == pytest.approx(1 / down.value)
    assert up.low == pytest.approx(1 / down.high) and up.high == pytest.approx(1 / down.low)


def test_the_product_of_a_ratio_and_one_that_is_sure_has_its_interval() -> None:
    ratio = ratio_interval([3.0, 4.0, 5.0], [2.0, 2.5, 2.0])
    sure = ratio_interval([2.0, 2.0], [1.0, 1.0])
    found = product_interval([ratio, sure])
    assert found.value == pytest.approx(2 * ratio.value) and found.n == 2
    assert found.low == pytest.approx(2 * ratio.low) and found.high == pytest.approx(2 * ratio.high)
    assert product_interval([]).value == 1


def test_welchs_interval_has_the_expected_degrees_of_freedom_for_equal_groups() -> None:
    """Groups of one size and variance have 2n - 2 degrees of freedom: here 4, whose quantile is 2.7764."""
    found = difference_interval([2.0, 3.0, 4.0], [1.0, 2.0, 3.0])
    assert found.value == 1.0
    assert found.high - found.value == pytest.approx(2.7764451051977987 * math.sqrt(2 / 3), rel=1e-9)
    same = difference_interval([1.0, 1.0], [0.5, 0.5])
    assert (same.low, same.high) == (0.5, 0.5)


def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    """2,000 draws: the share lies within four standard errors (0.02) of 0.95."""
    draw = random.Random(7)
    intervals = [mean_interval([draw.gauss(10, 2) for _ in range(4)]) for _ in range(2000)]
    assert sum(each.low <= 10 <= each.high for each in intervals) / 2000 == pytest.approx(0.95, abs=0.02)


def test_what_is_written_reads_back() -> None:
    found = mean_interval([1.0, math.inf])
    assert Interval.model_validate_json(mean_interval([1.0, 2.0]).model_dump_json()) == mean_interval([1.0, 2.0])
    assert math.isnan(Interval.model_validate_json(found.model_dump_json()).low)


def test_the_interval_of_a_cross_validation_is_wider_than_that_of_independent_scores():
    """Nadeau and Bengio 2003: the variance of a mean of n is 1/n + test/train times that of the scores."""
    scores = [0.90, 0.92, 0.88, 0.91, 0.95]
    plain, corrected = mean_interval(scores), resampled_interval(scores, 0.25)
    assert (corrected.value, corrected.n) == (plain.value, 5)
    assert corrected.high - corrected.value == pytest.approx(math.sqrt(1 + 5 * 0.25) * (plain.high - plain.value))
    assert resampled_interval(scores, 0.0).low == pytest.approx(plain.low)
    assert resampled_interval([0.5], 0.25).low is None
