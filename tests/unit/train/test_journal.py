"""What is written of each step: means over what was trained, none of what was skipped; nothing is saved of a NaN."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.core.class_table import ClassCount, ClassTable
from paceline.core.dataset import DatasetInfo
from paceline.core.errors import NonFiniteLossError
from paceline.core.results import EvalReport, EvalResult
from paceline.data.batch import Batch
from paceline.measure.rate import Stopwatch
from paceline.parallel.single import SingleDevice
from paceline.recipe.load import load
from paceline.recipe.patch import Patch
from paceline.recipe.plan import Plan
from paceline.train.journal import Journal
from paceline.train.logsink import EvalRecord, NoTrace, StepRecord
from paceline.train.state import TrainState

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


def journal(state: TrainState, sink: Kept) -> Journal:
    """Return a journal whose learning rate in update n is n + 1."""
    schedule = SimpleNamespace(lr=lambda updates: updates + 1.0)
    ticks = iter(range(10_000))
    return Journal(PLAN, SingleDevice(), schedule, sink, NoTrace(), Stopwatch(0.0, lambda: float(next(ticks))), state)


def go(book: Journal, state: TrainState, losses: Sequence[float], skipped: Sequence[int] = ()) -> None:
    """Train as the engine does: a step that is skipped is counted before the journal hears of it."""
    for loss in losses:
        state.skipped += state.step in skipped
        book.step(state, BATCH, torch.tensor(loss))
        state.advance(8)


def test_a_record_has_the_mean_loss_since_the_one_before() -> None:
    state, sink = TrainState(), Kept()
    go(journal(state, sink), state, [1.0, 2.0, 3.0, 6.0, 8.0, 8.0, 8.0, 4.0])
    assert [(record.step, record.loss, record.lr) for record in sink.steps] == [(4, 3.0, 4.0), (8, 7.0, 8.0)]
    assert [(record.epoch, record.images_seen) for record in sink.steps] == [(0.5, 32), (1.0, 64)]


def test_a_skipped_step_is_in_no_mean_and_does_not_move_the_learning_rate() -> None:
    state, sink = TrainState(), Kept()
    go(journal(state, sink), state, [1.0, math.nan, 3.0, 5.0, 8.0, 8.0, 8.0, math.inf], skipped=[1, 7])
    assert [(record.step, record.loss, record.lr) for record in sink.steps] == [(4, 3.0, 3.0), (8, 8.0, 6.0)]


def test_when_all_steps_were_skipped_there_is_no_loss_to_write() -> None:
    state, sink = TrainState(), Kept()
    go(journal(state, sink), state, [math.nan] * 4 + [1.0, 2.0, 3.0, 2.0], skipped=range(4))
    assert [(record.step, record.loss) for record in sink.steps] == [(8, 2.0)]


def test_a_loss_that_is_no_number_is_not_written_and_not_saved() -> None:
    state, sink = TrainState(), Kept()
    book = journal(state, sink)
    go(book, state, [1.0, math.nan, 3.0, 5.0])
    assert sink.steps == []
    with pytest.raises(NonFiniteLossError, match=r"^train: the loss is nan by step 4, at lr 4 \(lower optim.lr\)"):
        book.settle(state)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5, 6, 7])
def test_a_journal_goes_on_where_a_saved_one_was(cut: int) -> None:
    losses, skipped = [1.0, 2.0, math.nan, 6.0, 8.0, 8.0, math.nan, 4.0], [2, 6]
    whole_state, whole = TrainState(), Kept()
    go(journal(whole_state, whole), whole_state, losses, skipped)

    state, sink = TrainState(), Kept()
    book = journal(state, sink)
    for step, loss in enumerate(losses[:cut]):
        go(book, state, [loss], skipped)
        if step + 1 in (2, cut):  # an earlier save must leave nothing behind in a later one
            book.settle(state)
    resumed = TrainState.from_dict(state.to_dict())
    go(journal(resumed, sink), resumed, losses[cut:], skipped)
    assert [(record.step, record.loss, record.lr) for record in sink.steps] == [
        (record.step, record.loss, record.lr) for record in whole.steps
    ]
    assert len(whole.steps) == 2


def test_an_evaluation_is_written_with_its_classes_and_the_skipped_steps() -> None:
    state, sink = TrainState(), Kept()
    book = journal(state, sink)
    go(book, state, [1.0, math.nan], skipped=[1])
    result = EvalResult(images=8, top1=0.5, top5=1.0, loss=1.0)
    state.evaluated(EvalReport(val=result, classes=ClassTable((ClassCount("a", 8, 4),))))
    book.evaluated(state)
    (record,) = sink.evals
    assert (record.step, record.epoch, record.images_seen, record.skipped) == (2, 0.25, 16, 1)
    assert record.report == state.last and record.report.classes is not None
