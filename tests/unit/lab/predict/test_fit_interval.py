"""An interval holds the prediction, is reproducible, and is wider where less is known."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.lab.predict.from_points import MIN_NOISE, TWO_LEVELS, compute_bounds, estimate_noise, fit_formula
from paceline.lab.predict.points import ScalingPoint

ONE_NODE = [ScalingPoint(ranks, 1, 128, 1e6, 1e6 / ranks * 0.002 + 30) for ranks in (1, 2, 4, 8)]
TWO_NODES = [
    *ONE_NODE,
    ScalingPoint(16, 2, 128, 1e6, 1e6 / 16 * 0.0021 + 30),
    ScalingPoint(32, 4, 128, 1e6, 1e6 / 32 * 0.0022 + 30),
]


def width(points: Sequence[ScalingPoint], ranks: int, nodes: int) -> float:
    """Return the upper bound over the lower one."""
    chosen = fit_formula(TWO_LEVELS, points)
    target = ScalingPoint(ranks, nodes, 128, 1e6, 1.0)
    ((low_s, high_s),) = compute_bounds(chosen, points, [target])
    said = float(chosen.predict_times([target])[0])
    assert 0 < low_s <= said <= high_s
    return high_s / low_s


def test_bounds_are_the_same_each_time() -> None:
    assert width(TWO_NODES, 64, 8) == width(TWO_NODES, 64, 8)


def test_a_run_itself_scatters_so_bounds_are_never_closer_than_noise() -> None:
    """Two standard deviations either way; the draws are 200 a form, so their quantile is known to a tenth or so."""
    assert width(TWO_NODES, 8, 1) > 1 + 0.8 * 4 * MIN_NOISE


def test_further_away_less_is_known() -> None:
    assert width(TWO_NODES, 8, 1) < width(TWO_NODES, 64, 8) < width(TWO_NODES, 512, 64)


def test_nodes_that_no_point_has_widen_the_bounds_upwards_only() -> None:
    chosen = fit_formula(TWO_LEVELS, ONE_NODE)
    on_one, on_two = (ScalingPoint(16, nodes, 128, 1e6, 1.0) for nodes in (1, 2))
    (low_s, high_s), (low_on_two_s, high_on_two_s) = compute_bounds(chosen, ONE_NODE, [on_one, on_two])
    assert high_on_two_s > 1.05 * high_s
    assert low_on_two_s >= low_s


def test_points_that_contradict_one_another_widen_the_bounds() -> None:
    contradicting = [*TWO_NODES, *(replace(point, time_s=1.5 * point.time_s) for point in TWO_NODES)]
    chosen = fit_formula(TWO_LEVELS, contradicting)
    noise = estimate_noise(chosen, contradicting)
    # Half of the points lie a factor of sqrt(1.5) above the middle and half below: 0.2 in the logarithm, and what a
    # term takes of the freedom on top.
    assert 0.2 < noise < 0.4
    assert width(contradicting, 64, 8) > width(TWO_NODES, 64, 8)


def test_points_on_the_formula_scatter_by_what_is_assumed() -> None:
    assert estimate_noise(fit_formula(TWO_LEVELS, ONE_NODE), ONE_NODE) == MIN_NOISE


@pytest.mark.parametrize("points", [ONE_NODE[:1], ONE_NODE[2:3], ONE_NODE[:1] * 3, ONE_NODE[1:3]])
def test_few_points_give_bounds_too(points: list[ScalingPoint]) -> None:
    assert width(points, 16, 2) > 1.2  # a single number of ranks says nothing of several
