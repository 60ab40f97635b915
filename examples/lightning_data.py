"""Train your own Lightning module on paceline's data, in exact order and resumable within an epoch.

    python examples/lightning_data.py
    python examples/lightning_data.py folder data.source.name=pack data.source.root=photos.pack data.batch_size=256

Without arguments, it trains on scikit-learn's digits, in seconds on a CPU. `data.batch_size` counts all ranks: it is
independent of the number of devices, which share each batch.
"""

import sys

import lightning as L
import torch
from torch import Tensor, nn

from paceline.interop.lightning import DataModule


class Classifier(L.LightningModule):
    """A small model for images of any size, and its training."""

    net: nn.Module

    def configure_model(self) -> None:
        """Build the model for the classes and channels of the data."""
        dataset = self.trainer.datamodule.train.dataset
        self.net = nn.Sequential(
            nn.Conv2d(dataset.channels, 32, 3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(512, dataset.num_classes),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch, which is already normalized and on this device."""
        images, targets = batch
        return nn.functional.cross_entropy(self.net(images), targets)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the correct images of this batch as a share of all images on all devices; the sum is the accuracy."""
        # Lightning's mean over devices assumes equally many images per device.
        images, labels = batch
        correct = (self.net(images).argmax(1) == labels).sum()
        num_images = self.trainer.datamodule.val.dataset.num_images
        self.log("val_top1", correct / num_images, reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def main() -> None:
    """Fit for three epochs, and print the accuracy."""
    data = DataModule(*(sys.argv[1:] or ["digits"]))
    trainer = L.Trainer(max_epochs=3, logger=False, enable_checkpointing=False, enable_model_summary=False)
    trainer.fit(Classifier(), datamodule=data)
    if trainer.is_global_zero:
        print(f"top1 {trainer.callback_metrics['val_top1']:.1%}")


if __name__ == "__main__":
    main()
