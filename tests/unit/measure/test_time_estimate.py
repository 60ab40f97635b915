"""The estimate of a run's time, on a clock that the test moves."""

import math
from dataclasses import replace

import pytest

from paceline.measure.time_estimate import PlannedWork, RunEstimator

WORK = PlannedWork(total_steps=1000, batch_size=100, eval_every=300, eval_images=1500, save_every=500)
END_S = 0.5


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def run(estimator: RunEstimator, clock: Clock, last: int, step_s=lambda step: 0.1) -> None:
    for step in range(estimator.step + 1, last + 1):
        clock.now_s += step_s(step)
        estimator.update(step)


def test_evaluations_and_checkpoints_count_before_they_have_happened() -> None:
    """1,500 images are 15 steps forward, 5 of training; evaluations follow steps 300, 600, 900 and the last one."""
    clock = Clock()
    estimator = RunEstimator(WORK, now=clock)
    run(estimator, clock, 100)
    found = estimator.remaining()
    assert (found.steps, found.evaluations, found.checkpoints) == (900, 4, 2)
    assert found.step_s == pytest.approx(0.1) and found.eval_s == pytest.approx(0.5)
    assert found.predicted_s == pytest.approx(900 * 0.1 + 4 * 0.5 + END_S)
    assert found.low_s < found.predicted_s < found.high_s


def test_weighing_images_counts_before_and_after_it_has_happened() -> None:
    """3,000 images are 30 steps forward, 10 of training, after steps 400 and 800; it then takes 3 s."""
    clock = Clock()
    estimator = RunEstimator(replace(WORK, weigh_after=range(400, 1000, 400), weigh_images=3000), now=clock)
    run(estimator, clock, 100)
    assert estimator.remaining().predicted_s == pytest.approx(900 * 0.1 + 4 * 0.5 + 2 * 1.0 + END_S)
    run(estimator, clock, 400)
    with estimator.paused("weigh", 400):
        clock.now_s += 3
    assert estimator.remaining().predicted_s == pytest.approx(600 * 0.1 + 3 * 0.5 + 3.0 + END_S)


def test_the_first_step_and_pauses_are_in_no_step_time() -> None:
    clock = Clock()
    estimator = RunEstimator(WORK, now=clock)
    run(estimator, clock, 300, lambda step: 30.0 if step == 1 else 0.1)
    for pause_s in (3.0, 1.0):  # the first one warms up
        with estimator.paused("evaluate", estimator.step):
            clock.now_s += pause_s
        run(estimator, clock, estimator.step + 300)
    with estimator.paused("checkpoint", estimator.step):
        clock.now_s += 2.0
    found = estimator.remaining()
    assert estimator.step == 900 and found.step_s == pytest.approx(0.1)
    assert (found.eval_s, found.evaluations) == (pytest.approx(1.0), 1)
    assert (found.checkpoint_s, found.checkpoints) == (pytest.approx(2.0), 1)
    assert found.predicted_s == pytest.approx(100 * 0.1 + 1.0 + 2.0 + END_S)


def test_a_stall_that_happens_once_counts_for_little_and_a_regular_one_in_full() -> None:
    clock = Clock()
    once = RunEstimator(WORK, now=clock)
    run(once, clock, 200, lambda step: 6.0 if step == 50 else 0.1)
    assert once.step_s == pytest.approx(0.1, rel=0.1)
    regular = RunEstimator(WORK, now=clock)
    run(regular, clock, 200, lambda step: 0.5 if step % 5 == 0 else 0.1)
    assert regular.step_s == pytest.approx(0.18, rel=0.05)


def test_a_slow_start_is_left_out() -> None:
    """The first 20 of 140 steps take five times as long, as caches fill: a third of the time."""
    clock = Clock()
    estimator = RunEstimator(WORK, now=clock)
    run(estimator, clock, 140, lambda step: 0.5 if step <= 20 else 0.1 + 0.01 * (step % 2))
    assert estimator.remaining().step_s == pytest.approx(0.105, rel=0.02)


def test_steps_of_other_image_sizes_are_scaled_by_their_pixels_until_they_are_measured() -> None:
    clock = Clock()
    work = PlannedWork(total_steps=100, batch_size=8, sizes=((0, 16), (50, 32)))
    estimator = RunEstimator(work, now=clock)
    run(estimator, clock, 40)
    before = estimator.remaining()
    assert before.predicted_s == pytest.approx(10 * 0.1 + 50 * 0.4 + END_S)
    run(estimator, clock, 50)
    run(estimator, clock, 90, lambda step: 0.3)
    after = estimator.remaining()
    assert after.predicted_s == pytest.approx(10 * 0.3 + END_S)
    assert after.high_s / after.predicted_s < before.high_s / before.predicted_s
    assert estimator.forecast(0).predicted_s == pytest.approx(50 * 0.1 + 50 * 0.3 + END_S)


def test_steps_that_train_frozen_parameters_later_count_twice_until_they_are_measured() -> None:
    clock = Clock()
    work = PlannedWork(total_steps=200, batch_size=8, sizes=((0, 16), (100, 32)), unfreeze_step=50)
    estimator = RunEstimator(work, now=clock)
    run(estimator, clock, 40)
    before = estimator.remaining()
    assert before.predicted_s == pytest.approx(10 * 0.1 + 50 * 0.2 + 100 * 0.8 + END_S)
    assert before.low_s < 10 * 0.1 + 50 * 0.3 + 100 * 0.9 + END_S < before.high_s
    run(estimator, clock, 50)
    run(estimator, clock, 90, lambda step: 0.3)
    assert estimator.remaining().predicted_s == pytest.approx(10 * 0.3 + 100 * 1.2 + END_S)
    assert estimator.step_s == pytest.approx(0.3)
    assert estimator.forecast(0).predicted_s == pytest.approx(50 * 0.1 + 50 * 0.3 + 100 * 1.2 + END_S)
    resumed = RunEstimator(work, 60, clock)
    run(resumed, clock, 90, lambda step: 0.3)
    assert resumed.forecast(0).predicted_s == pytest.approx(50 * 0.15 + 50 * 0.3 + 100 * 1.2 + END_S)


def test_the_interval_grows_with_the_scatter_of_blocks_and_with_their_correlation() -> None:
    widths = []
    for step_s in (
        lambda step: 0.1,
        lambda step: 0.05 if step // 10 % 2 else 0.15,
        lambda step: 0.05 if step // 50 % 2 else 0.15,
    ):
        clock = Clock()
        estimator = RunEstimator(PlannedWork(total_steps=4000, batch_size=1), now=clock)
        run(estimator, clock, 400, step_s)
        found = estimator.remaining()
        widths.append(found.high_s - found.low_s)
    assert widths[0] < widths[1] < widths[2]


def test_few_blocks_that_differ_much_do_not_predict_no_time_at_all() -> None:
    clock = Clock()
    estimator = RunEstimator(PlannedWork(total_steps=1000, batch_size=1), now=clock)
    run(estimator, clock, 7, lambda step: 0.5 if step % 3 else 3.0)
    found = estimator.remaining()
    assert found.low_s > 0.3 * found.predicted_s and found.high_s > 2 * found.predicted_s


def test_it_counts_down_within_a_step_and_ends_at_the_time_limit() -> None:
    clock = Clock()
    estimator = RunEstimator(PlannedWork(total_steps=10, batch_size=1), now=clock, limit_s=60.0)
    assert estimator.left_s is None
    run(estimator, clock, 3, lambda step: 4.0)
    assert estimator.left_s == pytest.approx(28 + END_S)
    clock.now_s += 1.5
    assert estimator.left_s == pytest.approx(26.5 + END_S)
    clock.now_s += 100
    assert estimator.left_s == pytest.approx(24 + END_S)
    limited = RunEstimator(PlannedWork(total_steps=100, batch_size=1), now=clock, limit_s=60.0)
    run(limited, clock, 5, lambda step: 4.0)
    assert limited.left_s == pytest.approx(40.0) and limited.remaining().high_s == pytest.approx(40.0)
    assert limited.forecast(5).predicted_s == pytest.approx(380 + END_S)


def test_a_long_run_keeps_few_blocks_and_the_same_mean() -> None:
    clock = Clock()
    estimator = RunEstimator(PlannedWork(total_steps=10**6, batch_size=1), now=clock)
    run(estimator, clock, 5000, lambda step: 0.6)
    assert len(estimator._blocks) <= 512
    assert estimator.step_s == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("every", "step", "last", "times"), [(0, 0, 10, 0), (3, 0, 10, 4), (5, 5, 10, 1), (3, 10, 10, 0)]
)
def test_evaluations_are_counted_as_the_trainer_makes_them(every, step, last, times) -> None:
    work = PlannedWork(total_steps=last, batch_size=1, eval_every=every, save_every=every)
    assert work.evaluations(step) == work.checkpoints(step) == times


def test_checkpoints_by_the_clock_are_counted_by_the_time_that_is_left() -> None:
    work = PlannedWork(total_steps=10, batch_size=1, save_every_s=60.0)
    assert work.checkpoints(0, 250.0) == 5 and math.isfinite(work.save_every_s)
