"""Records of steps: means over trained steps, without skipped ones; a NaN is not saved."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.core.dataset import DatasetInfo
from paceline.core.errors import NonFiniteLossError
from paceline.core.results import ClassCount, ClassTable, EvalReport, EvalResult
from paceline.data.batch import Batch
from paceline.measure.throughput import RunTimer
from paceline.parallel.strategy import SingleDevice
from paceline.recipe.load import Patch, load
from paceline.recipe.plan import Plan
from paceline.training.goodput import TimeSpent
from paceline.training.logging.base import EvalRecord, StepRecord
from paceline.training.metrics_logger import BatchAccuracy, MetricsLogger
from paceline.training.state import TrainState

INFO = DatasetInfo("made", "train", 64, ("a", "b"), 3, (8, 8), (0.5,) * 3, (0.5,) * 3)
WORDS = ["data.batch_size=8", "train.epochs=2", "log.every=4st", "schedule.warmup=0ep"]
PLAN = Plan.derive(load("digits", Patch.parse(WORDS)).recipe, 1, INFO, replace(INFO, split="val"))
EMPTY = torch.empty(8, 0, dtype=torch.float64)
BATCH = Batch(torch.zeros(8, 3, 8, 8, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64), np.arange(8), EMPTY)


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.evals: list[EvalRecord] = []

    def started(self, plan: Plan, step: int) -> None:
        """Take no note."""

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def evaluated(self, record: EvalRecord) -> None:
        self.evals.append(record)

    def close(self) -> None:
        """Have nothing to close."""


@dataclass
class Now:
    """A clock that is moved by hand."""

    value_s: float = 0.0

    def __call__(self) -> float:
        return self.value_s


def journal(
    state: TrainState, sink: Kept, now: Callable[[], float] | None = None, accuracy: BatchAccuracy | None = None
) -> MetricsLogger:
    """Return a logger whose learning rate in update n is n + 1."""
    schedule = SimpleNamespace(lr=lambda updates: updates + 1.0, observe_loss=lambda loss: None)
    ticks = iter(range(10_000))
    watch = RunTimer(state.trained_s, now or (lambda: float(next(ticks))), train_before_s=state.train_s)
    return MetricsLogger(PLAN, SingleDevice(), schedule, sink, None, watch, accuracy, state)


def log_steps(logger: MetricsLogger, state: TrainState, losses: Sequence[float], skipped: Sequence[int] = ()) -> None:
    """Train as the engine does: a step that is skipped is counted before the journal hears of it."""
    for loss in losses:
        state.skipped += state.step in skipped
        logger.log_step(state, BATCH, torch.tensor(loss))
        state.advance(8)


def test_a_record_has_the_mean_loss_since_the_one_before() -> None:
    state, sink = TrainState(), Kept()
    log_steps(journal(state, sink), state, [1.0, 2.0, 3.0, 6.0, 8.0, 8.0, 8.0, 4.0])
    assert [(record.step, record.loss, record.lr) for record in sink.steps] == [(4, 3.0, 4.0), (8, 7.0, 8.0)]
    assert [(record.epoch, record.images_seen) for record in sink.steps] == [(0.5, 32), (1.0, 64)]


def test_a_skipped_step_is_in_no_mean_and_has_the_learning_rate_of_the_next_update() -> None:
    state, sink = TrainState(), Kept()
    log_steps(journal(state, sink), state, [1.0, math.nan, 3.0, 5.0, 8.0, 8.0, 8.0, math.inf], skipped=[1, 7])
    assert [(record.step, record.loss, record.lr) for record in sink.steps] == [(4, 3.0, 3.0), (8, 8.0, 7.0)]


def test_listeners_get_the_learning_rate_of_each_step() -> None:
    state, sink, rates = TrainState(), Kept(), []
    schedule = SimpleNamespace(lr=lambda updates: updates + 1.0, observe_loss=lambda loss: None)
    watch = RunTimer(0.0, lambda: 0.0)

    def on_step(state: TrainState, lr: float) -> None:
        rates.append(lr)

    logger = MetricsLogger(PLAN, SingleDevice(), schedule, sink, None, watch, None, state, dict, on_step)
    log_steps(logger, state, [math.inf, 1.0, math.nan, math.nan, 1.0], skipped=[0, 2, 3])
    assert rates == [1.0, 1.0, 2.0, 2.0, 2.0]


def test_a_record_has_rounded_shares_of_stages_and_asks_once_per_record() -> None:
    state, sink, shares = TrainState(), Kept(), iter([{}, {"data_wait": 1 / 3}])
    schedule = SimpleNamespace(lr=lambda updates: 1.0, observe_loss=lambda loss: None)
    watch = RunTimer(0.0, lambda: 0.0)
    logger = MetricsLogger(PLAN, SingleDevice(), schedule, sink, None, watch, None, state, lambda: next(shares))
    log_steps(logger, state, [1.0] * 8)
    assert [record.stage_shares for record in sink.steps] == [{}, {"data_wait": 0.3333}]


def test_without_a_finite_loss_no_record_is_written() -> None:
    state, sink = TrainState(), Kept()
    log_steps(journal(state, sink), state, [math.nan] * 4 + [1.0, 2.0, 3.0, 2.0], skipped=range(4))
    assert [(record.step, record.loss) for record in sink.steps] == [(8, 2.0)]


def test_a_loss_that_is_no_number_is_not_written_and_not_saved() -> None:
    state, sink = TrainState(), Kept()
    logger = journal(state, sink)
    log_steps(logger, state, [1.0, math.nan, 3.0, 5.0])
    assert sink.steps == []
    with pytest.raises(NonFiniteLossError, match=r"^train: the loss is nan at step 4, at lr 4 \(lower optim.lr\)"):
        logger.write_to_state(state)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5, 6, 7])
def test_a_resumed_logger_writes_the_same_records(cut: int) -> None:
    losses, skipped = [1.0, 2.0, math.nan, 6.0, 8.0, 8.0, math.nan, 4.0], [2, 6]
    whole_state, whole = TrainState(), Kept()
    log_steps(journal(whole_state, whole), whole_state, losses, skipped)

    state, sink = TrainState(), Kept()
    logger = journal(state, sink)
    for step, loss in enumerate(losses[:cut]):
        log_steps(logger, state, [loss], skipped)
        if step + 1 in (2, cut):  # an earlier save must leave nothing behind in a later one
            logger.write_to_state(state)
    resumed = TrainState.from_dict(state.to_dict())
    log_steps(journal(resumed, sink), resumed, losses[cut:], skipped)
    assert [(record.step, record.loss, record.lr) for record in sink.steps] == [
        (record.step, record.loss, record.lr) for record in whole.steps
    ]
    assert len(whole.steps) == 2


def test_an_evaluation_is_written_with_its_classes_and_the_skipped_steps() -> None:
    state, sink = TrainState(), Kept()
    logger = journal(state, sink)
    log_steps(logger, state, [1.0, math.nan], skipped=[1])
    result = EvalResult(images=8, top1=0.5, top5=1.0, loss=1.0)
    state.record_evaluation(EvalReport(val=result, classes=ClassTable((ClassCount("a", 8, 4),))))
    logger.log_evaluation(state)
    (record,) = sink.evals
    assert (record.step, record.epoch, record.images_seen, record.skipped) == (2, 0.25, 16, 1)
    assert record.report == state.last and record.report.classes is not None


def timed_run(state: TrainState, sink: Kept, last_step: int) -> None:
    """Train in steps of 2 s, evaluate for 10 s every 4 steps, and save for 3 s every 3 steps, up to `last_step`."""
    now = Now(1000.0 * (1 + state.step))  # each process has a clock of its own
    logger = journal(state, sink, now)
    while state.step < last_step:
        now.value_s += 2.0
        log_steps(logger, state, [1.0])
        if state.step % 4 == 0:
            with logger.paused():
                now.value_s += 9.0
                state.record_evaluation(EvalReport(val=EvalResult(images=8, top1=0.5, top5=1.0, loss=1.0)))
                logger.log_evaluation(state)
                now.value_s += 1.0
        if state.step % 3 == 0 or state.step == last_step:
            with logger.paused():
                now.value_s += 1.0
                logger.write_to_state(state)
                now.value_s += 2.0


@pytest.mark.parametrize("cut", range(1, 16))
def test_seconds_of_an_epoch_are_of_training_alone_and_of_a_resumed_run_the_same(cut: int) -> None:
    """PLAN has 8 steps an epoch, evaluates twice in it, and a step has 8 images: 16 s, and 4 images/s."""
    whole = Kept()
    timed_run(TrainState(), whole, 16)
    assert [(each.train_s, each.epoch_s, each.images_per_s) for each in whole.evals] == [
        (8.0, 16.0, 4.0), (16.0, 16.0, 4.0), (24.0, 16.0, 4.0), (32.0, 16.0, 4.0),
    ]  # fmt: skip
    # 4 evaluations of 10 s; of that which is noted, its last second is yet to come. 3, 6, 9, 12 and 15 were saved.
    assert whole.evals[-1].trained_s == 32.0 + 4 * 10.0 - 1.0 + 5 * 3.0

    resumed, state = Kept(), TrainState()
    timed_run(state, resumed, cut)
    timed_run(TrainState.from_dict(state.to_dict()), resumed, 16)
    assert [(each.step, each.train_s, each.epoch_s, each.images_per_s) for each in resumed.evals] == [
        (each.step, each.train_s, each.epoch_s, each.images_per_s) for each in whole.evals
    ]
    assert all(record.images_per_s == 4.0 for record in resumed.steps)


def test_a_checkpoint_of_before_there_was_train_s_counts_by_the_clock() -> None:
    """Its first evaluation is timed over the steps since, which are known."""
    values = TrainState(step=2, images_seen=16, trained_s=20.0, spent=TimeSpent(eval_s=5.0, checkpoint_s=3.0)).to_dict()
    del values["train_s"], values["since_eval"]
    sink = Kept()
    timed_run(TrainState.from_dict(values), sink, 4)
    (record,) = sink.evals
    assert (record.train_s, record.epoch_s, record.images_per_s) == (12.0 + 4.0, 16.0, 4.0)


def counted_run(state: TrainState, sink: Kept, last_step: int) -> None:
    """Train on 8 images a step, `step` % 9 of which are right and one more second, evaluated every 6 steps."""
    accuracy = BatchAccuracy(2, torch.device("cpu"))
    logger = journal(state, sink, accuracy=accuracy)
    while state.step < last_step:
        num_right = state.step % 9
        labels = torch.zeros(8, dtype=torch.int64)
        logits = torch.tensor([[1.0, 0.0] if image < num_right else [0.0, 1.0] for image in range(8)])
        accuracy.add(logits, labels)
        log_steps(logger, state, [1.0])
        if state.step % 6 == 0:
            state.record_evaluation(EvalReport(val=EvalResult(images=8, top1=0.5, top5=1.0, loss=1.0)))
            logger.log_evaluation(state)
    logger.write_to_state(state)


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 6, 7, 11])
def test_accuracy_on_the_training_batches_is_since_the_record_and_the_evaluation_before(cut: int) -> None:
    whole, resumed, state = Kept(), Kept(), TrainState()
    counted_run(TrainState(), whole, 12)
    right = [step % 9 for step in range(12)]
    assert [each.top1 for each in whole.steps] == [sum(right[:4]) / 32, sum(right[4:8]) / 32, sum(right[8:]) / 32]
    assert [each.batch_top1 for each in whole.evals] == [sum(right[:6]) / 48, sum(right[6:]) / 48]
    assert {each.top5 for each in whole.steps} | {each.batch_top5 for each in whole.evals} == {1.0}

    counted_run(state, resumed, cut)
    counted_run(TrainState.from_dict(state.to_dict()), resumed, 12)
    assert [each.top1 for each in resumed.steps] == [each.top1 for each in whole.steps]
    assert [each.batch_top1 for each in resumed.evals] == [each.batch_top1 for each in whole.evals]
