"""The clock in Lightning, as a callback to copy: where did every second of this training go?

    python examples/lightning_callback.py

Lightning calls back at seams, and a stage is what lies between two of them:

data_wait   end of a batch -> the next has come; other callbacks' work at the end of a batch, as a checkpoint, is in it
h2d         the batch has come -> it starts; needs the module's `on_before_batch_transfer`, else it is in data_wait
forward     start of the batch -> gradients are zeroed: all of `training_step`, so the loss too
backward    as it says; on several ranks waiting for the gradients of others is in it
optimizer   zeroing the gradients; then clipping, the step, and the schedulers

A step of the clock is a batch, also where gradients are accumulated. It pauses between epochs and in validation.
"""

# ruff: noqa: D102  Lightning's documentation says when it calls its hooks

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.measure import StageClock


class StageClockCallback(L.Callback):
    """Time `fit`: `clock` is there from its first batch, and `clock.drain()` is what it has measured."""

    clock: StageClock

    def __init__(self, warmup_steps: int = 3) -> None:
        self._warmup_steps = warmup_steps
        self._open: AbstractContextManager[Any] = nullcontext()  # what is timed now, and is left for the next
        self._waiting: AbstractContextManager[Any] = nullcontext()  # what a validation interrupts

    def _enter(self, part: AbstractContextManager[Any]) -> None:
        self._open.__exit__(None, None, None)
        self._open = part
        self._open.__enter__()

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.clock = StageClock.for_device(module.device.type, warmup_steps=self._warmup_steps)
        self._enter(self.clock.paused("epoch_boundary"))  # until the loader has started and its first batch has come

    def batch_has_come(self) -> None:
        """Let `h2d` begin. No hook of a callback says so, the module's `on_before_batch_transfer` does."""
        self._enter(self.clock.stage("h2d"))

    def on_train_batch_start(self, *_: Any) -> None:
        self._enter(self.clock.stage("forward"))

    def on_before_zero_grad(self, *_: Any) -> None:
        self._enter(self.clock.stage("optimizer"))

    def on_before_backward(self, *_: Any) -> None:
        self._enter(self.clock.stage("backward"))

    def on_after_backward(self, *_: Any) -> None:
        self._enter(nullcontext())  # where gradients are accumulated, no step of the optimizer follows

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
    """Three layers, large enough that computing is what takes the time."""

    def __init__(self, stages: StageClockCallback) -> None:
        super().__init__()
        self.stages = stages
        self.layers = nn.Sequential(
            nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.stages.batch_has_come()
        return batch

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_top1", (self.layers(batch[0]).argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def made_up(num_images: int) -> TensorDataset:
    """Return images that are rows of 512 numbers, with labels that mean nothing."""
    return TensorDataset(torch.randn(num_images, 512), torch.arange(num_images) % 10)


def main() -> None:
    """Fit for two epochs, and print where the time went."""
    stages = StageClockCallback()
    trainer = L.Trainer(max_epochs=2, callbacks=[stages], logger=False, enable_checkpointing=False)
    train, val = DataLoader(made_up(2560), batch_size=128, shuffle=True), DataLoader(made_up(256), batch_size=128)
    trainer.fit(Classifier(stages), train, val)
    if trainer.is_global_zero:
        print(stages.clock.drain().table())


if __name__ == "__main__":
    main()
