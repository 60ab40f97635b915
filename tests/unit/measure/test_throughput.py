"""`measure.throughput`: images a second and their spread, on known seconds."""

import pytest

from paceline.measure.throughput import Throughput, throughput


def test_equal_steps_have_no_spread() -> None:
    assert throughput([0.5] * 40, images_per_step=64, excluded_s=3.0) == Throughput(
        images_per_s=128.0, spread=(128.0, 128.0), n=4, excluded_s=3.0
    )


def test_spread_is_the_10th_and_90th_percentile_over_windows_of_10_steps() -> None:
    """Eleven windows of 100, 200 .. 1100 images/s: percentiles fall on the second and the tenth."""
    rates = [100.0 * window for window in range(1, 12)]
    step_s = [10.0 / rate for rate in rates for _ in range(10)]

    result = throughput(step_s, images_per_step=10, excluded_s=0.0)

    assert result.spread == pytest.approx((200.0, 1000.0))
    assert result.n == 11
    assert result.images_per_s == pytest.approx(1100 / sum(step_s))


def test_the_last_window_may_be_short() -> None:
    result = throughput([1.0] * 10 + [2.0] * 5, images_per_step=8, excluded_s=0.0)

    assert result.n == 2
    assert result.spread == pytest.approx((4.4, 7.6))
    assert result.images_per_s == 6.0


def test_no_counted_step_is_zero_and_keeps_what_was_excluded() -> None:
    assert throughput([], images_per_step=8, excluded_s=7.0) == Throughput(0.0, (0.0, 0.0), 0, 7.0)
