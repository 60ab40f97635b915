"""Log training metrics: mean loss, learning rate, throughput, and accuracy on training batches."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from paceline.core.errors import NonFiniteLossError
from paceline.data.batch import Batch
from paceline.measure.throughput import RunTimer
from paceline.parallel.strategy import Strategy
from paceline.recipe.plan import Plan
from paceline.training.logging.base import EvalRecord, LogSink, SampleTrace, StepRecord
from paceline.training.lr_schedule import LrSchedule
from paceline.training.state import CorrectCounts, StepInterval, TrainingSinceEval, TrainState

_SHARE_DIGITS: Final = 4


class BatchAccuracy:
    """Count the correctly classified images of this rank's training batches, on `device`.

    The target of a mixed image is the class with the largest share, as in torchvision.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        # Updated in place, so that a captured step counts too.
        self._counts = torch.zeros(min(5, num_classes), dtype=torch.int64, device=device)

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Count a batch of logits float [N, C] and `targets`: classes int64 [N], or probabilities float [N, C]."""
        with torch.no_grad():
            labels = targets.argmax(dim=1) if targets.is_floating_point() else targets
            best = logits.topk(len(self._counts), dim=1).indices
            self._counts.add_((best == labels[:, None]).sum(dim=0))

    def pop_counts(self) -> Tensor:
        """Return how often the target ranked first, second, ..., int64 [min(5, C)], and reset."""
        counts = self._counts.clone()
        self._counts.zero_()
        return counts


def to_correct_counts(counts: Tensor, images: int) -> CorrectCounts:
    """Return top-1 and top-5 counts from counts by rank of the target. Waits for the device."""
    by_rank = counts.tolist()
    return CorrectCounts(images, by_rank[0], sum(by_rank))


class MetricsLogger:
    """Pass records of steps, every `plan.log_every`, and of evaluations to `sink`.

    Every rank has one, since the loss is averaged over ranks; only rank 0's sink writes. `pop_shares` returns this
    rank's shares of step time by stage since its last call, from 0 to 1. `on_step` is called after each step, with its
    learning rate.
    """

    def __init__(
        self,
        plan: Plan,
        strategy: Strategy,
        schedule: LrSchedule,
        sink: LogSink,
        trace: SampleTrace | None,
        timer: RunTimer,
        accuracy: BatchAccuracy | None,
        state: TrainState,
        pop_shares: Callable[[], Mapping[str, float]] = dict,
        on_step: Callable[[TrainState, float], None] = lambda state, lr: None,
    ) -> None:
        self._interval = StepInterval(plan.log_every, plan.total_steps)
        self._batch_size = plan.batch_size
        self._steps_per_epoch = plan.steps_per_epoch
        self._strategy = strategy
        self._schedule = schedule
        self._sink = sink
        self._trace = trace
        self._timer = timer
        self._accuracy = accuracy
        self._pop_shares = pop_shares
        self._on_step = on_step
        self._batches = 0  # counted by `accuracy` since the last read
        self._since_log = state.since_log
        self._loss: Tensor | float = state.loss_sum
        self._steps = state.loss_steps
        self._skipped = state.skipped
        # Training since the latest evaluation: by earlier processes, and the point where this process resumed.
        self._since_eval = state.since_eval
        self._eval_from = (state.step, state.train_s)

    def log_step(self, state: TrainState, batch: Batch, loss: Tensor) -> None:
        """Log step `state.step` (from 0) with this rank's mean `loss` float32 [], ignored if it was skipped."""
        if self._trace:
            self._trace.record(state.step, batch)
        is_skipped = state.skipped != self._skipped
        lr = self._schedule.lr(state.num_updates + is_skipped)  # a skipped step is already no update
        if not is_skipped:
            self._loss = self._loss + loss  # on the device: a step that is not logged never synchronizes
            self._steps += 1
        self._skipped = state.skipped
        self._batches += 1
        self._timer.add(self._batch_size)
        if self._interval.is_due(state.step + 1):
            self._log_record(state, lr)
        self._on_step(state, lr)

    def log_evaluation(self, state: TrainState) -> None:
        """Log the evaluation `state.last`, and the training since the previous one."""
        assert state.last is not None
        self._write_progress(state)
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
        self._since_eval = state.since_eval = TrainingSinceEval()
        self._eval_from = (state.step, state.train_s)

    def write_to_state(self, state: TrainState) -> None:
        """Store the progress of the current log interval in `state`, which is about to be saved.

        Raise `NonFiniteLossError` for a non-finite loss, so that the weights are not saved.
        """
        if isinstance(self._loss, Tensor):
            self._loss = self._strategy.mean(self._loss)
        state.loss_sum = float(self._loss)
        state.loss_steps = self._steps
        if not math.isfinite(state.loss_sum):
            lr = self._schedule.lr(max(0, state.num_updates - 1))
            raise NonFiniteLossError(
                f"train: the loss is {state.loss_sum} at step {state.step}, at lr {lr:.4g} (lower optim.lr)"
            )
        self._write_progress(state)

    def paused(self) -> AbstractContextManager[None]:
        """Return a context whose time does not count for throughput and epochs."""
        return self._timer.paused()

    def _write_progress(self, state: TrainState) -> None:
        """Store times and counts so far in `state`; called in a pause."""
        self._add_accuracy()
        state.since_log = self._since_log
        state.trained_s, state.train_s = self._timer.elapsed_s, self._timer.train_s
        before, (from_step, from_s) = self._since_eval, self._eval_from
        steps, train_s = before.steps + state.step - from_step, before.train_s + state.train_s - from_s
        state.since_eval = TrainingSinceEval(steps, train_s, before.correct)

    def _add_accuracy(self) -> None:
        """Add the device's counts over all ranks. Collective."""
        if self._accuracy:
            counted = to_correct_counts(
                self._strategy.sum(self._accuracy.pop_counts()), self._batches * self._batch_size
            )
            self._since_log = self._since_log.plus(counted)
            self._since_eval = replace(self._since_eval, correct=self._since_eval.correct.plus(counted))
        self._batches = 0

    def _log_record(self, state: TrainState, lr: float) -> None:
        # All ranks skip the same steps, so either all have a loss, and call the collectives, or none.
        if not isinstance(self._loss, Tensor):
            return
        loss = self._strategy.mean(self._loss / self._steps).item()
        if not math.isfinite(loss):  # the run is about to fail
            return
        step = state.step + 1
        self._schedule.observe_loss(loss)
        self._add_accuracy()
        top1, top5 = self._since_log.shares
        self._sink.step(
            StepRecord(
                step=step,
                epoch=step / self._steps_per_epoch,
                images_seen=step * self._batch_size,
                loss=loss,
                lr=lr,
                images_per_s=self._timer.rate(),
                trained_s=self._timer.elapsed_s,
                top1=top1,
                top5=top5,
                # After the loss was read: a GPU has then completed the steps before this one.
                stage_shares={stage: round(each, _SHARE_DIGITS) for stage, each in self._pop_shares().items()},
            )
        )
        self._loss, self._steps, self._since_log = 0.0, 0, CorrectCounts()
