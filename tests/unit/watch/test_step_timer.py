"""The timer of watched scripts: stages, pauses and steps from the calls of a script alone."""

import math
from threading import Thread

import pytest

from paceline.watch.step_timer import StepTimer

TRAIN, VAL = 0, 1


class Script:
    """Calls of a script, each of which takes a given number of seconds on a clock that only they advance."""

    def __init__(self):
        self.now_s = 100.0
        self.steps = []
        self.timer = StepTimer(90.0, self.steps.append, lambda: self.now_s)

    def idle(self, seconds):
        self.now_s += seconds

    def start_loader(self, loader=TRAIN, seconds=1.0):
        counts = self.timer.begin_loader(loader)
        self.idle(seconds)
        if counts:
            self.timer.end_loader(loader)

    def batch(self, loader=TRAIN, seconds=2.0, *, is_first=False, is_end=False):
        counts = self.timer.begin_wait(loader, is_first=is_first)
        self.idle(seconds)
        if counts:
            self.timer.end_wait(loader, 0 if is_end else 8, is_end=is_end)

    def forward(self, seconds=4.0, *, is_training=True, has_gradients=True, is_known=False):
        modes = {"is_training": is_training, "has_gradients": has_gradients, "is_known": is_known}
        stage = self.timer.begin_forward(**modes)
        self.idle(seconds)
        if stage is not None:
            self.timer.end_forward(stage, has_gradients=has_gradients)

    def evaluate_batch(self, seconds=4.0, **modes):
        self.forward(seconds, **{"is_training": False, "has_gradients": False, **modes})

    def backward(self, seconds=8.0, wait=0.0):
        assert self.timer.begin_backward()
        self.idle(seconds)
        if wait:
            self.timer.mark_gradients()
            self.idle(wait)
        self.timer.end_backward()

    def optimize(self, seconds=16.0, optimizer=1):
        self.timer.begin_optimizer(optimizer)
        self.idle(seconds)
        self.timer.end_optimizer(optimizer)

    def call(self, stage, seconds):
        previous = self.timer.begin_stage(stage)
        self.idle(seconds)
        if previous is not None:
            self.timer.end_stage(previous)

    def pause(self, name, seconds):
        counts = self.timer.begin_pause(name)
        self.idle(seconds)
        if counts:
            self.timer.end_pause()

    def step(self):
        self.batch()
        self.forward()
        self.idle(0.5)
        self.backward()
        self.optimize()

    def begin(self):
        """Train a first step, with an unknown loader."""
        self.start_loader()
        self.batch(is_first=True)
        self.forward()
        self.backward()
        self.optimize()

    def finish(self):
        """Return all steps and the pauses after them, once every second of them has one place."""
        pauses = self.timer.finish()
        for step in self.steps:
            paused_s = math.fsum(end_s - start_s for _, start_s, end_s in step.pauses if start_s >= step.start_s)
            assert math.fsum(step.stages.values()) + paused_s == pytest.approx(step.end_s - step.start_s)
            assert min(step.stages.values()) >= 0
        assert [each.n for each in self.steps] == list(range(1, len(self.steps) + 1))
        return self.steps, pauses


@pytest.fixture
def script():
    return Script()


def stages_of(step):
    return {name: seconds for name, seconds in step.stages.items() if seconds}


PLAIN = {"data_wait": 2.0, "forward": 4.0, "loss": 0.5, "backward": 8.0, "optimizer": 16.0}


def test_each_call_of_a_plain_step_is_a_stage(script):
    script.begin()
    script.step()
    script.idle(0.25)
    script.step()
    (_, second, third), _ = script.finish()
    assert stages_of(second) == PLAIN
    assert stages_of(third) == {**PLAIN, "other": 0.25}
    assert (second.samples, second.micro_batches, second.loader) == (8, 1, TRAIN)


def test_the_time_from_a_batch_to_its_forward_prepares_it(script):
    script.begin()
    script.idle(0.25)
    script.batch()
    script.idle(1.0)
    script.call("log", 0.5)
    script.evaluate_batch(3.0)  # a teacher
    script.idle(2.0)
    script.forward()
    script.idle(0.5)
    script.backward()
    script.optimize()
    script.step()
    (_, second, third), _ = script.finish()
    assert stages_of(second) == {**PLAIN, "other": 0.25, "prepare": 3.0, "log": 0.5, "forward": 7.0}
    assert stages_of(third) == PLAIN


def test_the_last_batch_of_a_loader_that_fetches_one_ahead_is_prepared_too(script):
    script.begin()
    script.batch(seconds=0.5, is_end=True)  # the batch came before
    script.idle(1.0)
    script.forward()
    script.idle(0.5)
    script.backward()
    script.optimize()
    script.idle(0.25)
    (_, second), _ = script.finish()
    assert stages_of(second) == {**{name: PLAIN[name] for name in PLAIN if name != "data_wait"}, "prepare": 1.0}


@pytest.mark.parametrize("act", ["backward", "optimize"])
def test_without_a_forward_it_is_not_known_what_prepares_a_batch(script, act):
    script.begin()
    script.batch()
    script.idle(1.0)
    getattr(script, act)()
    script.idle(2.0)
    script.forward()
    script.backward()
    script.optimize()
    steps, _ = script.finish()
    assert sum(step.stages.get("other", 0.0) for step in steps) == 3.0
    assert not any("prepare" in step.stages for step in steps)


def test_the_time_before_the_first_loader_of_training_is_start_up(script):
    script.idle(3.0)
    script.start_loader(VAL)
    script.batch(VAL, is_first=True)
    script.evaluate_batch()
    script.idle(5.0)
    start_s = script.now_s
    script.begin()
    (first,), _ = script.finish()
    assert first.pauses == [("start_up", 90.0, start_s), ("epoch_boundary", start_s, start_s + 3.0)]
    assert first.start_s == start_s


def test_an_evaluation_lasts_from_its_loader_to_its_end(script):
    script.begin()
    script.step()
    script.batch(is_end=True, seconds=0.5)
    script.idle(0.0005)  # the pause before does not continue
    start_s = script.now_s
    script.start_loader(VAL)
    for is_first in (True, False):
        script.batch(VAL, is_first=is_first)
        script.evaluate_batch()
        script.idle(1.0)
    script.batch(VAL, is_end=True)
    end_s = script.now_s
    script.idle(0.25)
    script.pause("checkpoint", 7.0)
    script.start_loader()
    script.batch(is_first=True)
    script.forward()
    script.backward()
    script.optimize()
    (_, _, third), _ = script.finish()
    names = [(name, end_s - start_s) for name, start_s, end_s in third.pauses]
    assert names == [
        ("epoch_boundary", 0.5),
        ("evaluate", end_s - start_s),
        ("checkpoint", 7.0),
        ("epoch_boundary", 3.0),
    ]
    assert third.pauses[1][1:] == (start_s, end_s)
    assert stages_of(third) == {"other": pytest.approx(0.2505), "forward": 4.0, "backward": 8.0, "optimizer": 16.0}
    assert third.samples == 8


def test_an_evaluation_after_the_last_step_is_a_pause_of_none(script):
    script.begin()
    script.start_loader(VAL)
    script.batch(VAL, is_first=True)
    script.evaluate_batch()
    script.pause("checkpoint", 1.0)
    _, pauses = script.finish()
    assert [name for name, _, _ in pauses] == ["evaluate", "checkpoint"]


def test_a_teacher_does_not_evaluate(script):
    script.begin()
    script.batch()
    script.evaluate_batch(3.0)
    script.forward()
    script.backward()
    script.optimize()
    (_, second), _ = script.finish()
    assert second.pauses == []
    assert stages_of(second) == {"data_wait": 2.0, "forward": 7.0, "backward": 8.0, "optimizer": 16.0}


def test_a_trained_model_evaluates_on_the_batches_it_was_trained_on(script):
    script.begin()
    script.batch()
    script.evaluate_batch(3.0, is_known=True)
    script.step()
    (_, second), _ = script.finish()
    assert [name for name, _, _ in second.pauses] == ["evaluate"]
    assert stages_of(second) == {**PLAIN, "data_wait": 4.0}


def test_a_model_may_train_in_evaluation_mode(script):
    script.start_loader()
    for is_first in (True, False):
        script.batch(is_first=is_first)
        script.forward(is_training=False)
        script.idle(0.5)
        script.backward()
        script.optimize()
    (_, second), _ = script.finish()
    assert second.pauses == []
    assert stages_of(second) == PLAIN


def test_micro_batches_are_one_step(script):
    script.begin()
    for _ in range(3):
        script.batch()
        script.forward()
        script.backward()
    script.optimize()
    (_, second), _ = script.finish()
    assert stages_of(second) == {"data_wait": 6.0, "forward": 12.0, "backward": 24.0, "optimizer": 16.0}
    assert (second.samples, second.micro_batches) == (24, 3)


def test_optimizers_in_a_row_are_one_step(script):
    script.begin()
    script.step()
    script.optimize(1.0, optimizer=2)
    script.step()
    (_, second, third), _ = script.finish()
    assert stages_of(second) == {**PLAIN, "optimizer": 17.0}
    assert stages_of(third) == PLAIN


def test_an_optimizer_may_compute_the_gradients_in_its_closure(script):
    script.begin()
    script.batch()
    script.timer.begin_optimizer(1)
    script.idle(1.0)
    script.forward()
    script.idle(0.5)
    script.backward()
    script.idle(2.0)
    script.timer.end_optimizer(1)
    (_, second), _ = script.finish()
    assert stages_of(second) == {**PLAIN, "optimizer": 3.0}


def test_backward_that_waits_for_other_ranks_is_exposed_communication(script):
    script.begin()
    script.batch()
    script.forward()
    script.backward(8.0, wait=3.0)
    script.optimize()
    (_, second), _ = script.finish()
    assert second.stages["backward"] == 8.0
    assert second.stages["exposed_communication"] == 3.0


def test_only_outermost_calls_count_except_communication(script):
    script.begin()
    script.timer.begin_forward(is_training=True, has_gradients=True, is_known=True)
    script.call("log", 1.0)
    script.call("exposed_communication", 2.0)
    script.timer.end_forward("other", has_gradients=True)
    script.call("sync", 3.0)
    script.backward()
    script.optimize()
    script.call("optimizer", 5.0)
    script.step()
    (_, second, third), _ = script.finish()
    expected = {"forward": 1.0, "exposed_communication": 2.0, "sync": 3.0, "backward": 8.0, "optimizer": 16.0}
    assert stages_of(second) == expected
    assert stages_of(third) == {**PLAIN, "optimizer": 21.0}


def test_an_optimizer_whose_step_failed_does_not_stay_open(script):
    script.begin()
    script.timer.begin_optimizer(1)
    script.idle(1.0)
    script.step()
    script.step()
    steps, _ = script.finish()
    assert len(steps) == 3


def test_a_forward_may_train(script):
    script.begin()
    script.batch()
    script.timer.begin_forward(is_training=True, has_gradients=True, is_known=True)
    script.idle(4.0)
    script.backward()
    script.optimize()
    script.idle(1.0)
    script.timer.end_forward("other", has_gradients=True)
    script.step()
    (_, second, third), _ = script.finish()
    assert stages_of(second) == {"data_wait": 2.0, "forward": 4.0, "backward": 8.0, "optimizer": 16.0}
    assert stages_of(third) == {**PLAIN, "forward": 5.0}


def test_an_optimizer_within_an_evaluation_takes_no_training_step(script):
    script.begin()
    script.timer.begin_pause("evaluate")
    script.idle(1.0)
    script.optimize(2.0)
    script.timer.end_pause()
    script.step()
    (_, second), _ = script.finish()
    assert [(name, end_s - start_s) for name, start_s, end_s in second.pauses] == [("evaluate", 3.0)]
    assert stages_of(second) == PLAIN


def test_the_first_thread_that_trains_is_timed(script):
    thread = Thread(target=script.optimize)
    thread.start()
    thread.join()
    script.optimize()
    (first,), _ = script.finish()
    assert stages_of(first) == {"optimizer": 16.0}


def test_a_checkpoint_within_an_evaluation_is_a_checkpoint(script):
    script.begin()
    script.timer.begin_pause("evaluate")
    script.idle(1.0)
    script.pause("epoch_boundary", 2.0)
    script.pause("checkpoint", 4.0)
    script.idle(8.0)
    script.timer.end_pause()
    script.step()
    (_, second), _ = script.finish()
    lasted = [(name, end_s - start_s) for name, start_s, end_s in second.pauses]
    assert lasted == [("evaluate", 3.0), ("checkpoint", 4.0), ("evaluate", 8.0)]
    assert stages_of(second) == PLAIN
