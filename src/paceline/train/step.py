"""One optimizer step: forward, backward, update."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.data.finish import DeviceTransforms
from paceline.data.placement import DeviceTransfer
from paceline.measure import Clock
from paceline.parallel.strategy import Strategy
from paceline.train.accuracy import BatchAccuracy
from paceline.train.precision import Precision
from paceline.train.state import TrainState
from paceline.train.update import OptimizerUpdate


class TrainStep(Protocol):
    """Run one optimizer step."""

    def __call__(self, batch: Batch, state: TrainState) -> Tensor:
        """Run a step; return the mean loss of this rank's images, a tensor [] on the device. Generators are already
        seeded.
        """
        ...

    def sync(self) -> None:
        """Check all steps so far. The weights are about to be evaluated or saved."""
        ...


@dataclass(frozen=True)
class EagerStep:
    """An eager step. `replica` is the wrapped model of `Strategy.prepare`."""

    replica: nn.Module
    criterion: nn.Module
    precision: Precision
    strategy: Strategy
    transfer: DeviceTransfer
    transforms: DeviceTransforms
    update: OptimizerUpdate
    clock: Clock
    accumulate: int
    accuracy: BatchAccuracy

    def __call__(self, batch: Batch, state: TrainState) -> Tensor:
        """Run a step; return the mean loss."""
        loss = self.forward_backward(batch)
        with self.clock.stage("optimizer"):
            self.update(state, loss)
        return loss

    def forward_backward(self, batch: Batch) -> Tensor:
        """Accumulate the gradients of `batch` over its micro-batches; return the mean loss []."""
        clock = self.clock
        losses = []
        for number, micro_batch in enumerate(batch.split(self.accumulate), start=1):
            with self.strategy.accumulate(final=number == self.accumulate):
                with clock.stage("h2d"):
                    placed = self.transfer(micro_batch)
                with clock.stage("device_augment"):
                    images, targets = self.transforms(placed)
                with self.precision.autocast():
                    with clock.stage("forward"):
                        logits = self.replica(images)
                    with clock.stage("loss"):
                        loss = self.criterion(logits, targets) / self.accumulate
                        self.accuracy.add(logits, targets)
                with clock.stage("backward"):
                    self.precision.backward(loss)
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def sync(self) -> None:
        """Check all steps so far."""
        self.update.sync()
