"""Formulas are fitted exactly where points follow them, without negative costs, as far as these identify them."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from paceline.lab.predict.from_points import ALTERNATIVES, TWO_LEVELS, ScalingFormula, fit_formula, solve_coefficients
from paceline.lab.predict.points import ScalingPoint

TRUE = {"t_s": 0.0016, "c1_s": 0.0127, "c2_s": 0.0048, "f_s": 86.0}
PLACES = ((1, 1, 256), (4, 1, 256), (8, 2, 128), (16, 4, 128), (32, 8, 64))
NOTHING = 1e-6
"""Relative. Rounding in float64, times the condition number of the columns (about 1e5), leaves this much."""


def points(true: Mapping[str, float], places: tuple[tuple[int, int, int], ...] = PLACES) -> list[ScalingPoint]:
    """Return points that follow the form of two levels: images / (N b) (b t + c1 [N > 1] + c2 2 (n - 1) / n) + F."""
    found = []
    for ranks, nodes, batch in places:
        step_s = batch * true["t_s"] + true["c1_s"] * (ranks > 1) + true["c2_s"] * 2 * (nodes - 1) / nodes
        found.append(ScalingPoint(ranks, nodes, batch, 1e6, 1e6 / (ranks * batch) * step_s + true["f_s"]))
    return found


def fit_coefficients(form: ScalingFormula, measured: list[ScalingPoint], *, has_fixed: bool = True) -> dict[str, float]:
    found = fit_formula(form, measured, has_fixed=has_fixed)
    return {term.name: float(value) for term, value in zip(found.terms, found.coefficients, strict=True)}


def test_points_that_follow_the_form_give_its_coefficients() -> None:
    assert fit_coefficients(TWO_LEVELS, points(TRUE)) == pytest.approx(TRUE, rel=NOTHING)


def test_the_order_of_points_and_repeated_ones_change_nothing() -> None:
    measured = points(TRUE)
    assert fit_coefficients(TWO_LEVELS, [*measured[::-1], *measured]) == pytest.approx(TRUE, rel=NOTHING)


@pytest.mark.parametrize("form", [TWO_LEVELS, *ALTERNATIVES], ids=lambda form: form.name)
def test_no_cost_is_ever_negative(form: ScalingFormula) -> None:
    faster = [
        replace(point, time_s=100.0 / point.ranks**2) for point in points(TRUE)
    ]  # twice the ranks, 4 times as fast
    found = fit_formula(form, faster)
    assert (found.coefficients >= 0).all()
    assert (found.predict_times(faster) > 0).all()


def test_what_is_minimised_is_the_error_of_the_logarithm() -> None:
    """No coefficients nearby do better, on points that no coefficients fit."""
    random = np.random.default_rng(1)
    noisy = [
        replace(point, time_s=point.time_s * shift)
        for point, shift in zip(points(TRUE), (1.2, 0.8, 1.1, 0.9, 1.3), strict=True)
    ]
    found = fit_formula(TWO_LEVELS, noisy)
    times = np.array([point.time_s for point in noisy])
    columns = np.array([[term.growth(point) for term in found.terms] for point in noisy])

    def error(coefficients: np.ndarray) -> float:
        return float(np.square(np.log(columns @ coefficients / times)).sum())

    best = error(found.coefficients)
    assert best > 0.01
    for size in (1e-3, 1e-1):
        around = found.coefficients * np.exp(size * random.standard_normal((100, len(found.terms))))
        assert min(map(error, around)) > best - 1e-9  # the slope is 0 there: rounding may be on either side


@pytest.mark.parametrize(
    ("places", "names"),
    [
        (((1, 1, 256),), {"t_s"}),
        (((4, 1, 256),), {"t_s"}),
        (((1, 1, 256), (4, 1, 256)), {"t_s", "c1_s"}),
        (((1, 1, 128), (4, 1, 128), (8, 1, 128)), {"t_s", "c1_s", "f_s"}),
        (((1, 1, 128), (4, 1, 128), (16, 4, 128)), {"t_s", "c1_s", "c2_s"}),
        (((2, 1, 128), (4, 1, 128), (8, 1, 128)), {"t_s", "f_s"}),
        (PLACES[:4], {"t_s", "c1_s", "c2_s", "f_s"}),
    ],
)
def test_terms_that_points_do_not_identify_are_left_out(
    places: tuple[tuple[int, int, int], ...], names: set[str]
) -> None:
    measured = points(TRUE, places)
    found = fit_formula(TWO_LEVELS, measured)
    assert {term.name for term in found.terms} == names
    assert {term.name for term in found.left_out} == TRUE.keys() - names
    assert found.predict_times(measured) == pytest.approx([point.time_s for point in measured], rel=NOTHING)


def test_speeds_have_no_fixed_cost() -> None:
    without = {**TRUE, "f_s": 0.0}
    assert fit_coefficients(TWO_LEVELS, points(without), has_fixed=False) == pytest.approx(
        {name: value for name, value in TRUE.items() if name != "f_s"}, rel=NOTHING
    )


def test_parts_add_up_to_the_time() -> None:
    measured = points(TRUE)
    found = fit_formula(TWO_LEVELS, measured)
    parts = found.predict_parts(measured[3])
    assert set(parts) == {"compute", "several_ranks", "between_nodes", "start_up"}
    assert sum(parts.values()) == pytest.approx(measured[3].time_s, rel=NOTHING)


def test_units_do_not_matter() -> None:
    """Times in days instead of microseconds give coefficients as much larger."""
    columns, times = np.array([[1.0, 0.0], [0.5, 1.0], [0.25, 1.0]]), np.array([1.0, 0.9, 0.6])
    assert solve_coefficients(columns, times * 1e11) == pytest.approx(
        solve_coefficients(columns, times) * 1e11, rel=1e-9
    )  # rounding
