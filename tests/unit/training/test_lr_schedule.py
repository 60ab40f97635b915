"""The learning rate, by value at every step."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from paceline.core.dataset import DatasetInfo
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.training.lr_schedule import LrSchedule, LrWarmup, PlateauShape, build_lr_schedule, sample_lr_points

INFO = DatasetInfo("made", "train", 100, ("a", "b"), 3, (8, 8), (0.5,) * 3, (0.5,) * 3)


def schedule(section: dict[str, object], steps: int = 10, **optim: object) -> LrSchedule:
    recipe = Recipe.model_validate(
        {
            "data": {"batch_size": 20},
            "optim": {"name": "sgd", "lr": 0.1, **optim},
            "schedule": section,
            "train": {"steps": steps},
        }
    )
    return build_lr_schedule(recipe.schedule, Plan.derive(recipe, 1, INFO, INFO))


def course(made: LrSchedule, steps: int = 10) -> list[float]:
    return [made.lr(step) for step in range(steps)]


def test_constant_is_the_peak_after_a_linear_warm_up_that_ends_on_it() -> None:
    assert course(schedule({"name": "constant", "warmup": "4st"})) == pytest.approx([0.025, 0.05, 0.075] + [0.1] * 7)


def test_warm_up_starts_from_its_start() -> None:
    made = schedule({"name": "constant", "warmup": "5st", "warmup_start": 0.5})
    assert course(made, 6) == pytest.approx([0.06, 0.07, 0.08, 0.09, 0.1, 0.1])


def test_warm_up_can_rise_by_a_constant_factor() -> None:
    made = schedule({"name": "constant", "warmup": "3st", "warmup_start": 0.001, "warmup_shape": "exponential"})
    assert course(made, 4) == pytest.approx([0.001, 0.01, 0.1, 0.1])


def test_warm_up_can_stay_and_jump() -> None:
    made = schedule({"name": "constant", "warmup": "3st", "warmup_start": 0.1, "warmup_shape": "constant"})
    assert course(made, 5) == pytest.approx([0.01, 0.01, 0.01, 0.1, 0.1])


def test_warm_up_by_epoch_equals_torchs_linear_schedule_that_is_stepped_per_epoch() -> None:
    """An epoch has five steps. The DDP course drives `LinearLR` so, with one over the number of GPUs."""
    ours = schedule({"name": "constant", "warmup": "4ep", "warmup_start": 0.25, "warmup_by": "epoch"}, steps=40)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    theirs = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=4)
    expected = []
    for _ in range(8):
        expected += [optimizer.param_groups[0]["lr"]] * 5
        optimizer.step()
        theirs.step()
    # Torch multiplies the rate of the epoch before, so that rounding adds up.
    assert course(ours, 40) == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) > 4


def test_warm_up_by_epoch_can_rise_by_a_constant_factor() -> None:
    section = {"warmup": "2ep", "warmup_start": 0.01, "warmup_shape": "exponential", "warmup_by": "epoch"}
    made = schedule({"name": "constant", **section}, steps=15)
    assert course(made, 15) == pytest.approx([0.001] * 5 + [0.01] * 5 + [0.1] * 5)


def test_warm_up_by_epoch_and_plateau_equal_those_that_nersc_drives() -> None:
    """Its tutorial sets the rate of epoch e of n to e/n of the peak, and steps `ReduceLROnPlateau` only after those."""
    losses = [1.0, 2.0, 2.1, 2.2, 2.0, 1.9, 1.95, 1.96, 1.97, 1.8, 1.9, 1.9, 1.9]
    ours = schedule({"name": "plateau", "patience": 1, "warmup": "4ep", "warmup_by": "epoch"}, steps=5 * len(losses))
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.2, patience=1)
    seen = set()
    for epoch, loss in enumerate(losses):
        if epoch < 4:
            optimizer.param_groups[0]["lr"] = 0.1 * (epoch + 1) / 4
        assert [ours.lr(5 * epoch + step) for step in range(5)] == pytest.approx([optimizer.param_groups[0]["lr"]] * 5)
        seen.add(ours.lr(5 * epoch))
        ours.observe(loss, 5 * (epoch + 1))
        if epoch >= 4:
            theirs.step(loss)
    assert len(seen) == 4 + 2


def test_cosine_is_half_a_cosine() -> None:
    expected = [0.1 * (1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)]
    assert course(schedule({"name": "cosine"})) == pytest.approx(expected)


def test_cosine_after_warm_up_falls_over_what_is_left_to_its_final_share() -> None:
    made = schedule({"name": "cosine", "warmup": "2st", "final": 0.2})
    expected = [0.05, 0.1] + [0.1 * (0.2 + 0.8 * (1 + math.cos(math.pi * step / 8)) / 2) for step in range(8)]
    assert course(made) == pytest.approx(expected)


def test_linear_is_a_straight_line() -> None:
    assert course(schedule({"name": "linear"})) == pytest.approx([0.1 * (1 - step / 10) for step in range(10)])


def test_polynomial_is_a_power_of_what_is_left_after_warm_up() -> None:
    made = schedule({"name": "polynomial", "warmup": "2st", "power": 2.0, "final": 0.1})
    expected = [0.05, 0.1] + [0.1 * (0.1 + 0.9 * (1 - step / 8) ** 2) for step in range(8)]
    assert course(made) == pytest.approx(expected)


def test_step_multiplies_at_each_milestone_in_any_unit() -> None:
    made = schedule({"name": "step", "milestones": ["3st", "1ep", "80%"], "factor": 0.1})
    assert course(made) == pytest.approx([0.1] * 3 + [0.01] * 2 + [0.001] * 3 + [0.0001] * 2)


def test_one_cycle_equals_torchs() -> None:
    ours = course(schedule({"name": "one_cycle", "peak_at": "30%", "start": 0.04, "final": 4e-6}, steps=100), 100)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    # torch counts the peak and the end as steps taken, so its cycle of 101 steps has ours within it.
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=101, pct_start=31 / 101, div_factor=25, final_div_factor=1e4, cycle_momentum=False
    )
    expected = []
    for _ in range(100):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert ours == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_plateau_follows_torchs_scheduler() -> None:
    losses = [1.0, 0.9, 0.91, 0.92, 0.93, 0.5, 0.6, 0.6, 0.6, 0.6, 0.6, 0.4]
    ours = schedule({"name": "plateau", "factor": 0.2, "patience": 2})
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.2, patience=2)
    seen = set()
    for loss in losses:
        ours.observe(loss, 5)
        theirs.step(loss)
        assert ours.lr(5) == pytest.approx(optimizer.param_groups[0]["lr"])
        seen.add(round(ours.lr(5), 6))
    assert len(seen) == 3


@pytest.mark.parametrize("is_minimized", [True, False])
def test_plateau_of_a_metric_below_0_has_the_threshold_of_its_absolute_value(is_minimized: bool) -> None:
    shape = PlateauShape(0.5, 0, 0.1, is_minimized=is_minimized)
    shape.best = shape.worst
    shares = []
    for value in (-1.0, -1.0, -1.05, -1.2) if is_minimized else (-1.0, -1.0, -0.95, -0.8):
        shape.observe(value)
        shares.append(shape.share)
    assert shares == [1.0, 0.5, 0.25, 0.25]


def test_plateau_goes_on_from_its_state() -> None:
    one = LrSchedule(0.1, LrWarmup(0, 0.0), PlateauShape(0.2, 1, 1e-4))
    fresh = LrSchedule(0.1, LrWarmup(0, 0.0), PlateauShape(0.2, 1, 1e-4))
    fresh.load_state_dict(one.state_dict())
    assert fresh == one
    for loss in (1.0, 1.1, 1.2, 1.3):
        one.observe(loss, 5)
    other = LrSchedule(0.1, LrWarmup(0, 0.0), PlateauShape(0.2, 1, 1e-4))
    other.load_state_dict(one.state_dict())
    assert other == one and other.lr(0) == pytest.approx(0.02)


def test_a_range_test_rises_by_a_constant_factor_to_the_peak_at_the_last_step() -> None:
    made = schedule({"name": "range_test", "start": 1e-4}, steps=5)
    assert course(made, 5) == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 0.1])


def test_a_range_test_ends_once_the_smoothed_loss_is_a_multiple_of_its_minimum() -> None:
    made = schedule({"name": "range_test", "max_rise": 2.0})
    seen = []
    for loss in (1.0, 1.0, 9.0, 9.0, 0.1):
        made.observe_loss(loss)
        seen.append(made.has_diverged)
    # The first losses count in full: their average is 1, and then (0.1 * 1 + 0.09 * 1 + ...) over the sum of weights.
    average = np.average([1.0, 1.0, 9.0], weights=[0.081, 0.09, 0.1])
    assert average > 2 and seen == [False, False, True, True, True]


def test_a_range_test_resumes_from_its_state() -> None:
    one, other = (schedule({"name": "range_test"}) for _ in range(2))
    assert json.loads(json.dumps(one.state_dict())) == one.state_dict()  # infinity is no JSON
    for loss in (1.0, 0.5, 3.0):
        one.observe_loss(loss)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other == one and other.state_dict()["lowest"] is not None


@pytest.mark.parametrize(("rule", "peak"), [("none", 0.1), ("linear", 0.1 * 20 / 5), ("sqrt", 0.1 * math.sqrt(20 / 5))])
def test_the_peak_follows_the_batch_size(rule: str, peak: float) -> None:
    base = {} if rule == "none" else {"base_batch_size": 5}
    assert schedule({"name": "constant"}, lr_scaling=rule, **base).lr(3) == pytest.approx(peak)


@pytest.mark.parametrize("name", ["constant", "cosine", "linear"])
def test_a_run_that_ends_in_its_warm_up_is_the_start_of_the_longer_one(name: str) -> None:
    short, long = schedule({"name": name, "warmup": "8st"}, steps=4), schedule({"name": name, "warmup": "8st"}, 100)
    assert course(short, 4) == pytest.approx(course(long, 4))


@pytest.mark.parametrize(
    "section",
    [
        {"name": "cosine", "warmup": "37st"},
        {"name": "step", "milestones": ["333st", "334st"], "factor": 0.1, "warmup": "11st"},
        {"name": "one_cycle"},
        {"name": "constant"},
    ],
)
def test_the_planned_rate_is_the_schedule_between_its_points_and_has_the_peak(section) -> None:
    made = schedule(section, steps=1000)
    points = sample_lr_points(made, 1000)
    steps, rates = zip(*points, strict=True)
    assert (steps[0], steps[-1]) == (0, 999) and len(steps) < 150
    drawn = np.interp(np.arange(1000), steps, rates)
    # Each half of an interval is checked at its middle only, so elsewhere the line may be a little further off.
    np.testing.assert_allclose(drawn, course(made, 1000), atol=0.005 * 0.1)
    assert max(rates) == pytest.approx(max(course(made, 1000)), rel=1e-12)


def test_a_rate_that_depends_on_evaluations_is_not_planned() -> None:
    assert sample_lr_points(schedule({"name": "plateau"}), 10) == []
