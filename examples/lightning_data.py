"""Paceline's data in Lightning: packed photographs, exact order and resuming in mid-epoch, with your own module.

    python examples/lightning_data.py
    python examples/lightning_data.py folder data.source.name=pack data.source.root=photos.pack data.batch_size=256

Without words it trains on the digits that come with scikit-learn, in seconds on a CPU. `data.batch_size` counts all
ranks: with more devices it stays what it is, and each has its part.
"""

import sys

import lightning as L
import torch
from torch import Tensor, nn

from paceline.interop.lightning import DataModule


class Classifier(L.LightningModule):
    """A small network for images of any size, and the training of it."""

    net: nn.Module

    def configure_model(self) -> None:
        """Build the network once the data are there, which know how many classes and channels they have."""
        facts = self.trainer.datamodule.train.dataset
        self.net = nn.Sequential(
            nn.Conv2d(facts.channels, 32, 3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(512, facts.num_classes),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch, which is normalised and on this device already."""
        images, targets = batch
        return nn.functional.cross_entropy(self.net(images), targets)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the share of all images, over all devices, that this batch has right: the shares add up to the accuracy.

        Lightning's mean over devices would not do: it rounds the number of images to whole ones a device.
        """
        images, labels = batch
        hits = (self.net(images).argmax(1) == labels).sum()
        num_images = self.trainer.datamodule.val.dataset.num_images
        self.log("val_top1", hits / num_images, reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def main() -> None:
    """Fit for three epochs, and say what was learnt."""
    data = DataModule(*(sys.argv[1:] or ["digits"]))
    trainer = L.Trainer(max_epochs=3, logger=False, enable_checkpointing=False, enable_model_summary=False)
    trainer.fit(Classifier(), datamodule=data)
    if trainer.is_global_zero:
        print(f"top1 {trainer.callback_metrics['val_top1']:.1%}")


if __name__ == "__main__":
    main()
