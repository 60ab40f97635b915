"""What a run writes down while it trains. A step that is not logged costs one addition on the device.

That every loss and gradient is a number is for `train.guard` to see; what it has not caught is caught here, before
anything is saved.
"""

import math
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import Tensor

from paceline.core.errors import NonFiniteLossError
from paceline.data.batch import Batch
from paceline.measure.rate import Stopwatch
from paceline.parallel.strategy import Strategy
from paceline.recipe.plan import Plan
from paceline.train.accuracy import BatchAccuracy, correct
from paceline.train.cadence import Cadence
from paceline.train.logsink import EvalRecord, LogSink, SampleTrace, StepRecord
from paceline.train.schedule import Schedule
from paceline.train.state import Correct, SinceEval, TrainState


class Journal:
    """Turn steps and evaluations into records, every `plan.log_every` steps, and pass them to `sink`.

    All ranks keep one, since the loss is a mean over ranks; only rank 0's sink writes. All skip the same steps
    (`train.guard`), so either all have a loss to average or none has.
    """

    def __init__(
        self,
        plan: Plan,
        strategy: Strategy,
        schedule: Schedule,
        sink: LogSink,
        trace: SampleTrace,
        watch: Stopwatch,
        accuracy: BatchAccuracy,
        state: TrainState,
    ) -> None:
        self._cadence = Cadence(plan.log_every, plan.total_steps)
        self._batch_size = plan.batch_size
        self._steps_per_epoch = plan.steps_per_epoch
        self._strategy = strategy
        self._schedule = schedule
        self._sink = sink
        self._trace = trace
        self._watch = watch
        self._accuracy = accuracy
        self._batches = 0  # that `accuracy` has counted since it was last looked at
        self._since_log = state.since_log
        self._loss: Tensor | float = state.loss_sum
        self._steps = state.loss_steps
        self._skipped = state.skipped
        # The training since the newest evaluation: what of it earlier processes did, and where this one went on.
        self._since_eval = state.since_eval
        self._eval_from = (state.step, state.train_s)

    def step(self, state: TrainState, batch: Batch, loss: Tensor) -> None:
        """Note step `state.step` (from 0), whose mean loss on this rank is `loss` (float32 [], on the device).

        The loss of a step that was skipped is left out: it may be no number.
        """
        self._trace.record(state.step, batch)
        if state.skipped == self._skipped:
            self._loss = self._loss + loss
            self._steps += 1
        self._skipped = state.skipped
        self._batches += 1
        self._watch.add(self._batch_size)
        if self._cadence.due(state.step + 1):
            self._write(state)

    def evaluated(self, state: TrainState) -> None:
        """Note the evaluation that `state.last` holds, its classes, and the training since the one before."""
        assert state.last is not None
        self._take_times(state)
        steps, train_s = state.since_eval.steps, state.since_eval.train_s
        top1, top5 = state.since_eval.correct.shares
        self._sink.evaluated(
            EvalRecord(
                state.step,
                state.step / self._steps_per_epoch,
                state.images_seen,
                state.trained_s,
                state.last,
                state.skipped,
                train_s=state.train_s,
                epoch_s=train_s * self._steps_per_epoch / steps if steps else None,
                images_per_s=steps * self._batch_size / train_s if train_s > 0 else None,
                batch_top1=top1,
                batch_top5=top5,
            )
        )
        self._since_eval = state.since_eval = SinceEval()
        self._eval_from = (state.step, state.train_s)

    def settle(self, state: TrainState) -> None:
        """Put the losses since the last record, as a mean over the ranks, into `state`, which is about to be saved.

        Raise `NonFiniteLossError` when one of them is no number, so that what it made of the weights is not saved.
        """
        if isinstance(self._loss, Tensor):
            self._loss = self._strategy.mean(self._loss)
        state.loss_sum = float(self._loss)
        state.loss_steps = self._steps
        if not math.isfinite(state.loss_sum):
            lr = self._schedule.lr(max(0, state.updates - 1))
            raise NonFiniteLossError(
                f"train: the loss is {state.loss_sum} by step {state.step}, at lr {lr:.4g} (lower optim.lr)"
            )
        self._take_times(state)

    def paused(self) -> AbstractContextManager[None]:
        """Return the context of an evaluation or a checkpoint, whose time is in no rate and in no epoch's seconds."""
        return self._watch.paused()

    def close(self) -> None:
        """Close what is written to."""
        self._sink.close()
        self._trace.close()

    def _take_times(self, state: TrainState) -> None:
        """Put the times so far, and what was counted over all ranks, into `state`; in a pause."""
        self._count()
        state.since_log = self._since_log
        state.trained_s, state.train_s = self._watch.elapsed_s, self._watch.train_s
        before, (from_step, from_s) = self._since_eval, self._eval_from
        steps, train_s = before.steps + state.step - from_step, before.train_s + state.train_s - from_s
        state.since_eval = SinceEval(steps, train_s, before.correct)

    def _count(self) -> None:
        """Take what was counted on the device since the last time, over all ranks, each of which must call it."""
        counts = self._accuracy.take()
        if counts is not None:
            found = correct(self._strategy.sum(counts), self._batches * self._batch_size)
            self._since_log = self._since_log.plus(found)
            self._since_eval = replace(self._since_eval, correct=self._since_eval.correct.plus(found))
        self._batches = 0

    def _write(self, state: TrainState) -> None:
        """Write a record, unless it has no loss to tell: all its steps were skipped, or the run is about to end."""
        if not isinstance(self._loss, Tensor):
            return
        loss = self._strategy.mean(self._loss / self._steps).item()
        if not math.isfinite(loss):
            return
        step = state.step + 1
        self._count()
        top1, top5 = self._since_log.shares
        self._sink.step(
            StepRecord(
                step=step,
                epoch=step / self._steps_per_epoch,
                images_seen=step * self._batch_size,
                loss=loss,
                lr=self._schedule.lr(state.updates),
                images_per_s=self._watch.rate(),
                trained_s=self._watch.elapsed_s,
                top1=top1,
                top5=top5,
            )
        )
        self._loss, self._steps, self._since_log = 0.0, 0, Correct()
