"""The advised checkpoint interval, as JSON and as text."""

import pytest

from paceline.cli.doctor import SavingCosts, advise_interval
from paceline.core.goodput import daly_interval, efficiency
from paceline.core.units import Duration, rough_duration

SPOT = SavingCosts(stall_s=0.4, write_s=5.0, restart_s=120.0, step_s=0.25, every_s=600.0, slow_s=1.0)
HOUR = 3600.0


def test_the_best_interval_is_whole_steps_and_the_range_costs_hardly_more() -> None:
    values, _ = advise_interval(SPOT, 2 * HOUR)
    # A quarter of a second is the length of a step.
    assert values["best_s"] == values["best_steps"] * 0.25 == pytest.approx(daly_interval(0.4, 2 * HOUR), abs=0.125)
    low_s, high_s = values["range_s"]
    assert (low_s, high_s) == (values["best_s"] / 2, values["best_s"] * 2)
    flat = [1 - efficiency(each, 0.4, 120.0, 2 * HOUR, write_s=5.0) for each in (low_s, high_s)]
    # Saves and lost work are 1 % of the time here; a quarter of it more is 0.26 %, and the rest is of higher order.
    assert all(values["best_cost"] < cost < values["best_cost"] + 0.003 for cost in flat)


def test_the_setting_is_a_round_duration_that_a_recipe_takes_and_lies_in_the_range() -> None:
    for mtbf_s in (60.0, 600.0, HOUR, 24 * HOUR, 1000 * HOUR):
        values, _ = advise_interval(SavingCosts(0.4, 0.4, 30.0), mtbf_s)
        key, _, text = values["setting"].partition("=")
        low_s, high_s = values["range_s"]
        assert key == "checkpoint.every" and low_s <= Duration.parse(text).seconds <= high_s


def test_an_interval_below_a_second_is_in_steps() -> None:
    values, _ = advise_interval(SavingCosts(0.001, 0.002, 5.0, step_s=0.1), 60.0)
    assert values["setting"] == f"checkpoint.every={values['best_steps']}st" and values["best_steps"] == 3


def test_the_current_interval_is_compared_with_the_best() -> None:
    values, rows = advise_interval(SPOT, 2 * HOUR)
    printed = dict(rows)
    assert values["now_cost"] == 1 - efficiency(600.0, 0.4, 120.0, 2 * HOUR, write_s=5.0)
    assert printed["now"] == f"you save every 10 min: loses {values['now_cost']:.2%}, 3.07% more than the best"
    assert values["now_cost"] - values["best_cost"] == pytest.approx(0.0307, abs=5e-5)
    assert printed["worst case"] == "a kill loses up to 10 min of training" and values["worst_loss_s"] == 605.0
    assert values["signal_lead_s"] == 60.0 + 1.0 + 2 * 5.4


def test_an_interval_near_the_best_is_as_good() -> None:
    near = SavingCosts(0.4, 5.0, 120.0, 0.25, every_s=80.0)
    assert dict(advise_interval(near, 2 * HOUR)[1])["now"].endswith("as good as the best")


def test_without_steps_or_an_interval_the_time_is_advised_all_the_same() -> None:
    values, rows = advise_interval(SavingCosts(0.4, 5.0, 120.0), 2 * HOUR)
    assert values["best_steps"] is None and values["now_s"] is None
    assert [row[0] for row in rows] == ["failures", "best", "as good", "lead time"]


def test_saves_are_never_advised_closer_than_a_write_takes() -> None:
    values, _ = advise_interval(SavingCosts(0.4, 300.0, 120.0), 2 * HOUR)
    assert values["best_s"] == 300.0 and values["range_s"][0] == 300.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.25 s"), (7.14, "7.1 s"), (99.7, "100 s"), (750, "12 min"), (28_440, "7.9 h"), (4e6, "46 days")],
)
def test_estimates_have_two_digits(seconds: float, text: str) -> None:
    assert rough_duration(seconds) == text
