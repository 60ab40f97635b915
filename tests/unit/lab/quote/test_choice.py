"""Which plan is named for a limit of time or money, and why."""

import importlib.util
import math
from pathlib import Path

import pytest

from paceline.core.statistics import Interval
from paceline.lab.quote.choice import Limits, choose_plan
from paceline.lab.quote.plans import with_verdicts

_PATH = Path(__file__).parents[2] / "report" / "quoted.py"


@pytest.fixture(scope="module")
def plan():
    spec = importlib.util.spec_from_file_location("quoted", _PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.quoted_plan


def choose(plans, by=None, budget=None, currency="USD"):
    judged = [with_verdicts(each, by, budget) for each in plans]
    return choose_plan(judged, Limits(by, budget, currency))


@pytest.fixture
def plans(plan):
    # The cheaper, the slower.
    return [plan("t4", 1, 30.0, 6.0), plan("a100", 1, 10.0, 12.0), plan("h100", 8, 1.0, 24.0)]


def test_the_cheapest_plan_in_time_is_named_with_its_intervals(plans) -> None:
    answer, chosen = choose(plans, by=24.0)
    assert chosen == 1
    for part in ("cheapest", "within 24 h", "1 x a100", "10 h 00 min (8 h 00 min to 12 h 00 min)", "USD 12 (9.60 to"):
        assert part in answer


def test_the_fastest_plan_within_a_budget_is_named(plans) -> None:
    answer, chosen = choose(plans, budget=20.0)
    assert chosen == 1 and "fastest" in answer and "at most USD 20" in answer


def test_both_limits_have_to_be_kept(plans) -> None:
    assert choose(plans, by=24.0, budget=30.0)[1] == 1
    answer, chosen = choose(plans, by=2.0, budget=10.0)
    assert "No plan" in answer and "nearest" in answer and chosen in (0, 2)


def test_a_sure_plan_goes_before_a_likely_one_that_is_cheaper_and_named_too(plans) -> None:
    answer, chosen = choose(plans, by=11.0)
    assert chosen == 2
    assert answer.index("8 x h100") < answer.index("1 x a100") and "likely" in answer
    answer, chosen = choose(plans[:2], by=11.0)
    assert chosen == 1 and "surely" in answer


def test_the_nearest_plan_is_named_if_none_keeps_the_limit(plans) -> None:
    answer, chosen = choose(plans, by=0.5)
    assert chosen == 2 and "No plan is likely to end within 30 min" in answer
    answer, chosen = choose(plans, budget=3.0)
    assert chosen == 0 and "nearest" in answer


def test_without_limits_the_cheapest_and_the_fastest_are_named(plans) -> None:
    answer, chosen = choose(plans)
    assert chosen == 0 and "1 x t4" in answer and "8 x h100" in answer and "a100" not in answer
    answer, chosen = choose(plans[:1])
    assert chosen == 0 and answer.count("1 x t4") == 1


def test_without_prices_gpu_hours_decide(plan) -> None:
    plans = [plan("t4", 8, 4.0), plan("a100", 1, 10.0), plan("h100", 8, 1.0)]
    assert choose(plans, by=24.0, currency="")[1] == 2  # 8 GPU-hours
    answer, chosen = choose(plans[:2], by=24.0, currency="")
    assert chosen == 1 and "GPU-hours" in answer
    assert choose(plans, currency="")[1] == 2


def test_a_plan_that_cannot_run_is_never_named(plan, plans) -> None:
    too_large = plan("v100", 1, 5.0, 1.0, fits=False)
    assert choose([too_large, *plans], by=24.0)[1] == 2
    answer, chosen = choose([too_large], by=24.0)
    assert chosen is None and "memory" in answer and "largest micro-batch is 256" in answer
    assert "train.accumulate" in answer and "failures" not in answer
    never = plan("t4", 1, float("inf"), float("inf"))
    answer, chosen = choose([never])
    assert chosen is None and "failures" in answer and "memory" not in answer
    answer, chosen = choose([too_large, never, too_large.model_copy(update={"largest_micro_batch": 300})])
    assert chosen is None and "2 plans need more memory" in answer and "is 300" in answer and "leave 1 plan" in answer


def test_limits_are_shown_as_they_were_set(plans) -> None:
    assert "at most USD 15.05 " in choose(plans, budget=15.05)[0]
    assert "within 20 min" in choose(plans, by=1 / 3)[0]
    assert "within 1 h 30 min" in choose(plans, by=1.5)[0]


def test_an_interval_without_an_upper_bound_says_so(plan) -> None:
    open_ended = plan("t4", 1, 5.0, 200.0).model_copy(
        update={
            "hours": Interval(value=5.0, low=4.0, high=math.inf),
            "cost": Interval(value=200.0, low=190.0, high=math.inf),
        }
    )
    answer, _ = choose([open_ended])
    assert "(4 h 00 min or more)" in answer and "USD 200 (190 or more)" in answer


def test_spot_is_named(plan) -> None:
    answer, _ = choose([plan("t4", 8, 4.0, 2.0, pricing="spot")])
    assert "8 x t4 on spot" in answer
