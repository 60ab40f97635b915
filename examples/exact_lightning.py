"""Train with Lightning on an exact order of samples, and resume it within an epoch.

    python examples/exact_lightning.py
    torchrun --standalone --nproc_per_node=2 examples/exact_lightning.py

Kill it at any time and start it again, also with another number of processes that divides the batch size. The lines
marked `exact` are all that the order needs: Lightning saves the loader's position in its own checkpoints.
"""

import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.interop import ExactEvalSampler, ExactLoader, ExactSampler  # exact

EPOCHS, BATCH, SAVE_EVERY, NUM_TEST = 3, 96, 5, 360


class Classifier(L.LightningModule):
    """A linear model of scikit-learn's digits, with its data."""

    def __init__(self) -> None:
        super().__init__()
        digits = load_digits()
        images, labels = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
        self.train_set = TensorDataset(images[:-NUM_TEST], labels[:-NUM_TEST])
        self.test_set = TensorDataset(images[-NUM_TEST:], labels[-NUM_TEST:])
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def train_dataloader(self) -> ExactLoader:
        """Return this rank's share of each step; the batch size counts all ranks."""
        sampler = ExactSampler(len(self.train_set), BATCH, seed=0)  # exact
        return ExactLoader(DataLoader(self.train_set, batch_sampler=sampler, num_workers=1))  # exact

    def val_dataloader(self) -> DataLoader:
        """Return this rank's share of the test images, each of which is on one rank."""
        return DataLoader(self.test_set, batch_sampler=ExactEvalSampler(len(self.test_set), BATCH))  # exact

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log this batch's part of the mean loss; the sum over batches and ranks is the mean."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels, reduction="sum")
        self.log("test_loss", loss / len(self.test_set), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    """Fit from the newest checkpoint, if there is one, and print the test loss."""
    torch.manual_seed(0)
    trainer = L.Trainer(
        max_epochs=EPOCHS,
        devices=os.environ.get("LOCAL_WORLD_SIZE", "auto"),
        use_distributed_sampler=False,  # exact: the samplers divide among ranks themselves
        callbacks=[ModelCheckpoint("exact_lightning", every_n_train_steps=SAVE_EVERY, save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    newest = Path("exact_lightning/last.ckpt")
    trainer.fit(Classifier(), ckpt_path=newest if newest.exists() else None)
    if trainer.is_global_zero:
        print(f"step {trainer.global_step}: test loss {trainer.callback_metrics['test_loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
