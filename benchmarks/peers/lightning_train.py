"""Train a classifier of images in class folders with Lightning, as its documentation writes a module and a trainer.

python benchmarks/peers/lightning_train.py --data FOLDER --model resnet18 --size 128 --batch 64 --workers 2 --epochs 1
"""

import argparse
from pathlib import Path

import lightning as L
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageClassifier(L.LightningModule):
    """One of torchvision's models, trained by SGD with a cosine schedule."""

    def __init__(self, model: str, num_classes: int, lr: float) -> None:
        super().__init__()
        self.model = torchvision.models.get_model(model, num_classes=num_classes)
        self.loss = nn.CrossEntropyLoss()
        self.lr = lr

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        loss = self.loss(self.model(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy."""
        images, labels = batch
        logits = self.model(images)
        self.log("val_loss", self.loss(logits, labels))
        self.log("val_top1", (logits.argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self) -> dict[str, object]:
        """Return the optimizer and its schedule."""
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class ImageFolders(L.LightningDataModule):
    """The images of `root/train` and `root/val`, by worker processes that stay alive."""

    def __init__(self, root: Path, size: int, batch: int, workers: int) -> None:
        super().__init__()
        self.options = {"batch_size": batch, "num_workers": workers, "persistent_workers": workers > 0}
        to_floats = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        train = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *to_floats])
        val = v2.Compose([v2.Resize(round(size / 0.875)), v2.CenterCrop(size), *to_floats])
        self.train, self.val = ImageFolder(root / "train", train), ImageFolder(root / "val", val)

    def train_dataloader(self) -> DataLoader:
        """Return shuffled training batches."""
        return DataLoader(self.train, shuffle=True, **self.options)

    def val_dataloader(self) -> DataLoader:
        """Return validation batches."""
        return DataLoader(self.val, **self.options)


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.05)
    for name in ("size", "batch", "workers", "epochs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    data = ImageFolders(args.data, args.size, args.batch, args.workers)
    trainer = L.Trainer(
        accelerator=args.device,
        devices=args.devices,
        max_epochs=args.epochs,
        default_root_dir=args.out,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
    )
    trainer.fit(ImageClassifier(args.model, len(data.train.classes), args.lr), datamodule=data)


if __name__ == "__main__":
    main()
