"""The estimate that a run makes once of its own time, and its comparison with the truth."""

import os

import pytest
import torch

from paceline.core.world import World
from paceline.measure.throughput import RunTimer
from paceline.measure.time_estimate import PlannedWork, RunEstimator
from paceline.training.run_timing import RunTiming, measure_memory
from paceline.training.state import TrainState


class Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def train(steps: int, total: int, *, start: int = 0, step_s: float = 0.2, later_s: float | None = None, after_s=20.0):
    """Train from `start` to step `steps` of `total`; return the timing, and the estimates that it reported."""
    clock, reported = Clock(), []
    work = PlannedWork(total_steps=total, batch_size=1)
    timer = RunTimer(now=clock)
    timing = RunTiming(RunEstimator(work, start, clock), timer, reported.append, lambda: (3, 16), after_s)
    for step in range(start, steps):
        clock.now_s += (later_s or step_s) if reported else step_s
        timing.step_ended(TrainState(step=step))
    clock.now_s += 0.5
    return timing, reported


def test_a_long_run_reports_after_twenty_seconds_once_and_is_compared_with_the_truth() -> None:
    timing, (estimate,) = train(1000, 1000, later_s=0.25)
    assert 100 <= estimate.step <= 101 and estimate.made_s == pytest.approx(0.2 * estimate.step)
    assert (estimate.memory_bytes, estimate.memory_total_bytes, estimate.actual_s) == (3, 16, None)
    found = timing.estimate("completed")
    assert found.forecast == estimate.forecast and found.forecast.predicted_s == pytest.approx(
        (1000 - estimate.step) * 0.2 + 0.5
    )
    assert found.actual_s == pytest.approx((1000 - estimate.step) * 0.25 + 0.5)
    assert found.error == pytest.approx(-0.2, abs=0.01) and found.is_within is False


def test_a_shorter_run_reports_after_a_fifth_of_its_steps_and_a_very_short_one_never() -> None:
    timing, (estimate,) = train(50, 50)
    assert estimate.step == 16  # five blocks of three steps each, after the first step
    assert timing.estimate("completed").is_within is True
    timing, reported = train(12, 12)
    assert reported == [] and timing.estimate("completed") is None


@pytest.mark.parametrize("status", ["preempted", "time_reached", "target_reached", "patience_reached", "failed"])
def test_a_run_that_ends_early_has_nothing_to_compare(status) -> None:
    timing, reported = train(300, 1000)
    assert reported and timing.estimate(status) is None


def test_a_resumed_run_reports_and_has_nothing_to_compare() -> None:
    timing, (estimate,) = train(1000, 1000, start=500)
    assert estimate.step == 600 and timing.estimate("completed") is None


def test_a_run_that_its_time_ended_has_a_forecast_of_the_whole() -> None:
    timing, _ = train(300, 1000)
    forecast = timing.forecast("time_reached")
    assert (forecast.step, forecast.forecast.steps, forecast.memory_bytes) == (0, 1000, 3)
    assert forecast.forecast.predicted_s == pytest.approx(1000 * 0.2 + 0.5)
    assert timing.forecast("completed") is None and train(1, 1000)[0].forecast("time_reached") is None


def test_the_memory_of_a_node_is_that_of_a_rank_times_its_ranks() -> None:
    used, total = measure_memory(World.single(), torch.device("cpu"))
    assert 2**24 < used < total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
