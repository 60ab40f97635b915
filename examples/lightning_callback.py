"""Measure the time per stage in Lightning, with a callback to copy.

    python examples/lightning_callback.py

A stage is the time between two hooks of Lightning:

data_wait   from the end of a batch until the next is loaded, with other callbacks' work such as checkpoints
h2d         from then until the batch starts; needs the module's `on_before_batch_transfer`, else part of data_wait
forward     from the start of the batch until gradients are zeroed: all of `training_step`, including the loss
backward    the backward pass, including waiting for gradients of other ranks
optimizer   zeroing the gradients, gradient clipping, the optimizer step, and the schedulers

The clock counts batches, even if gradients are accumulated. It pauses between epochs and in validation.
"""

# ruff: noqa: D102  Lightning documents its hooks

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.measure import StageClock


class StageClockCallback(L.Callback):
    """Time `fit`; `clock` exists from the first batch on, and `clock.drain()` returns the measurements."""

    clock: StageClock

    def __init__(self, warmup_steps: int = 3) -> None:
        self._warmup_steps = warmup_steps
        self._open: AbstractContextManager[Any] = nullcontext()  # the stage or pause being timed
        self._waiting: AbstractContextManager[Any] = nullcontext()  # interrupted by validation

    def _enter(self, part: AbstractContextManager[Any]) -> None:
        self._open.__exit__(None, None, None)
        self._open = part
        self._open.__enter__()

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.clock = StageClock.for_device(module.device.type, warmup_steps=self._warmup_steps)
        self._enter(self.clock.paused("epoch_boundary"))  # until the first batch is loaded

    def start_transfer(self) -> None:
        """Start `h2d`; callbacks have no hook for it, so the module's `on_before_batch_transfer` calls this."""
        self._enter(self.clock.stage("h2d"))

    def on_train_batch_start(self, *_: Any) -> None:
        self._enter(self.clock.stage("forward"))

    def on_before_zero_grad(self, *_: Any) -> None:
        self._enter(self.clock.stage("optimizer"))

    def on_before_backward(self, *_: Any) -> None:
        self._enter(self.clock.stage("backward"))

    def on_after_backward(self, *_: Any) -> None:
        self._enter(nullcontext())  # no optimizer step follows if gradients are accumulated

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._enter(self.clock.stage("optimizer"))

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._enter(nullcontext())
        self.clock.end_step(images=len(batch[0]) * trainer.world_size)
        is_last = trainer.is_last_batch
        self._waiting = self.clock.paused("epoch_boundary") if is_last else self.clock.stage("data_wait")
        self._enter(self._waiting)

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._enter(self.clock.paused("evaluate"))

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._enter(self._waiting)

    def on_train_end(self, *_: Any) -> None:
        self._enter(nullcontext())


class Classifier(L.LightningModule):
    """Three layers, large enough that computation dominates."""

    def __init__(self, stages: StageClockCallback) -> None:
        super().__init__()
        self.stages = stages
        self.layers = nn.Sequential(
            nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.stages.start_transfer()
        return batch

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_top1", (self.layers(batch[0]).argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def made_up(num_images: int) -> TensorDataset:
    """Return rows of 512 random numbers as images, with random labels."""
    return TensorDataset(torch.randn(num_images, 512), torch.arange(num_images) % 10)


def main() -> None:
    """Fit for two epochs, and print the time per stage."""
    stages = StageClockCallback()
    trainer = L.Trainer(max_epochs=2, callbacks=[stages], logger=False, enable_checkpointing=False)
    train, val = DataLoader(made_up(2560), batch_size=128, shuffle=True), DataLoader(made_up(256), batch_size=128)
    trainer.fit(Classifier(stages), train, val)
    if trainer.is_global_zero:
        print(stages.clock.drain().table())


if __name__ == "__main__":
    main()
