"""`core.goodput`: the formulas give the figures worked out elsewhere, and a simulation agrees with them."""

import math
import random

import pytest
from scipy.stats import chi2

from paceline.core.goodput import (
    best_interval,
    daly_interval,
    efficiency,
    interval_steps,
    observed_mtbf,
    signal_lead,
    young_interval,
)

HOUR, DAY = 3600.0, 86400.0

# C, R, M, then T in seconds and E in percent at T, 10 T and T / 10, to the digits given.
# The last is the rate of unexpected interruptions of Llama 3, which reports over 90 % of effective time (2407.21783).
CASES = {
    "one node": (0.4, 30.0, 7 * DAY, 695, 99.88, 99.42, 99.42),
    "spot": (0.4, 120.0, 2 * HOUR, 76, 97.31, 93.2, 93.4),
    "1,024 GPUs": (30.0, 300.0, 7.9 * HOUR, 1286, 94.48, 78.0, 80.0),
    "Llama 3": (10.0, 600.0, 54 * DAY / 419, 465, 90.80, 76.1, 77.8),
}


@pytest.mark.parametrize("name", CASES)
def test_interval_and_share_of_useful_time_are_those_worked_out_elsewhere(name: str) -> None:
    stall_s, restart_s, mtbf_s, work_s, best, too_long, too_short = CASES[name]
    interval = daly_interval(stall_s, mtbf_s)
    assert round(interval) == work_s
    found = [100 * efficiency(factor * interval, stall_s, restart_s, mtbf_s) for factor in (1, 10, 0.1)]
    # Half of the last digit given.
    assert found[0] == pytest.approx(best, abs=0.005)
    assert found[1:] == pytest.approx([too_long, too_short], abs=0.05)


@pytest.mark.parametrize("name", CASES)
def test_no_interval_is_noticeably_better_than_dalys(name: str) -> None:
    stall_s, restart_s, mtbf_s, *_ = CASES[name]
    best = daly_interval(stall_s, mtbf_s)
    others = [efficiency(best * 1.02**power, stall_s, restart_s, mtbf_s) for power in range(-200, 201)]
    # Daly's is an expansion in √(C/M), off from the optimum by its third order: below 1e-6 for these.
    assert max(others) - efficiency(best, stall_s, restart_s, mtbf_s) < 1e-6


def simulated(work_s: float, stall_s: float, restart_s: float, mtbf_s: float, intervals: int) -> float:
    """Return the share of kept work over so many intervals, with failures drawn one by one."""
    draw = random.Random(7)
    wall_s, left_s = 0.0, draw.expovariate(1 / mtbf_s)
    for _ in range(intervals):
        needed_s = work_s + stall_s
        while left_s < needed_s:
            wall_s += left_s
            left_s = draw.expovariate(1 / mtbf_s)
            needed_s = restart_s + work_s + stall_s
        wall_s += needed_s
        left_s -= needed_s
    return intervals * work_s / wall_s


@pytest.mark.parametrize(("stall_s", "restart_s", "mtbf_s"), [(10.0, 600.0, 3.1 * HOUR), (5.0, 20.0, 120.0)])
def test_a_simulation_finds_the_same_share(stall_s: float, restart_s: float, mtbf_s: float) -> None:
    """The second case fails so often that formulas of the first order would be far off."""
    work_s = daly_interval(stall_s, mtbf_s)
    exact = efficiency(work_s, stall_s, restart_s, mtbf_s)
    # 30,000 intervals hold over 1,000 failures, so the lost share has a standard error of 3 %: four of them.
    assert simulated(work_s, stall_s, restart_s, mtbf_s, 30_000) == pytest.approx(exact, abs=0.12 * (1 - exact))


def test_youngs_interval_is_the_limit_of_dalys_for_short_stalls() -> None:
    assert young_interval(2.0, 100.0) == 20.0
    # The two differ by a third of √(C/2M), which is 2.4e-5 here.
    assert daly_interval(1e-4, DAY) == pytest.approx(young_interval(1e-4, DAY), rel=3e-5)


def test_a_stall_longer_than_failures_are_apart_asks_for_one_save_a_failure() -> None:
    assert daly_interval(200.0, 100.0) == 100.0


def test_saves_are_no_closer_than_a_write_takes() -> None:
    assert best_interval(0.4, 500.0, 2 * HOUR) == 500.0
    assert best_interval(0.4, 5.0, 2 * HOUR) == daly_interval(0.4, 2 * HOUR)


def test_a_background_write_costs_the_work_at_risk() -> None:
    plain, slow = (efficiency(76.0, 0.4, 120.0, 2 * HOUR, write_s=write_s) for write_s in (0.0, 72.0))
    # A hundredth of M more is lost with each failure; the exponential adds half its square, 5e-5.
    assert plain - slow == pytest.approx(0.01 * plain, abs=1e-4)


def test_an_interval_that_is_never_survived_is_worth_nothing() -> None:
    assert efficiency(1e6, 1.0, 1.0, 1.0) == 0.0


@pytest.mark.parametrize(("work_s", "steps"), [(695.0, 2780), (0.36, 1), (0.01, 1), (1.1, 4)])
def test_an_interval_is_whole_steps_and_at_least_one(work_s: float, steps: int) -> None:
    assert interval_steps(work_s, 0.25) == steps


def test_a_job_is_signalled_early_enough_for_a_step_and_two_saves() -> None:
    assert signal_lead(2.0, 5.0) == 72.0


@pytest.mark.parametrize("failures", [1, 3, 466])
def test_the_interval_of_the_mean_time_between_failures_is_that_of_chi_square(failures: int) -> None:
    found = observed_mtbf(failures, 54 * DAY)
    low = 2 * 54 * DAY / chi2.ppf(0.975, 2 * failures + 2)
    high = 2 * 54 * DAY / chi2.ppf(0.025, 2 * failures)
    # Two routines of scipy for one quantile agree to rounding.
    assert (found.low_s, found.high_s) == pytest.approx((low, high), rel=1e-9)
    assert found.low_s < found.mean_s == 54 * DAY / failures < found.high_s


def test_without_a_failure_there_is_a_lower_bound_only() -> None:
    found = observed_mtbf(0, 9 * HOUR)
    assert (found.mean_s, found.low_s, found.high_s) == (math.inf, 3 * HOUR, math.inf)
