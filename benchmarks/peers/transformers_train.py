"""Train a vision transformer on images in class folders with the Trainer of Transformers, as its documentation does.

python benchmarks/peers/transformers_train.py --data FOLDER --out FOLDER --size 64 --batch 16 --workers 2 --epochs 1
"""

import argparse
from pathlib import Path

import torch
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)


class Photographs(ImageFolder):
    """Images in the form that models of Transformers take."""

    def __getitem__(self, index: int) -> dict[str, object]:
        image, label = super().__getitem__(index)
        return {"pixel_values": image, "labels": label}


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    for name in ("size", "batch", "workers", "epochs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    to_floats = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    train = Photographs(args.data / "train", v2.Compose([v2.RandomResizedCrop(args.size), *to_floats]))
    val = Photographs(args.data / "val", v2.Compose([v2.Resize((args.size, args.size)), *to_floats]))
    config = ViTConfig(
        image_size=args.size,
        patch_size=args.size // 8,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=1024,
        num_labels=len(train.classes),
    )
    options = TrainingArguments(
        output_dir=str(args.out),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        dataloader_num_workers=args.workers,
        num_train_epochs=args.epochs,
        remove_unused_columns=False,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=10,
        report_to="none",
    )
    Trainer(ViTForImageClassification(config), options, train_dataset=train, eval_dataset=val).train()


if __name__ == "__main__":
    main()
