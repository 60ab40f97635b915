"""A run directory to export, as a run leaves one: a network of random weights, and what was recorded of it."""

import json
from pathlib import Path

import torch
from torch import nn

from paceline.data.sources.build import build_datasets
from paceline.models.build import build_model
from paceline.recipe.load import Patch, load
from paceline.recipe.yaml import to_yaml_text
from paceline.training.checkpoint import CheckpointStorage, KeepPolicy, Snapshot, model_tensors
from paceline.training.trained_dataset import TrainedDataset

STEP = 12
EVALS = [
    {"step": 6, "images": 200, "top1": 0.5, "top5": 0.9},
    {"step": STEP, "images": 200, "top1": 0.81, "top5": 0.975},
]
CLASSES = "class,images,correct,accuracy\n0,50,50,1.0\n1,50,32,0.64\n2,50,40,0.8\n3,50,40,0.8\n"
MACHINE = {"python": "3.11.9", "paceline": "0.1.0", "torch": "2.15.0", "cuda_devices": ["H200", "H200"], "cuda": "13.0"}
SYNTHETIC = ("data.source.name=synthetic", "data.source.num_images=64", "data.source.num_val_images=40",
             "data.source.num_classes=4", "data.batch_size=16")  # fmt: skip


def write(folder: Path, model: str = "resnet18_cifar", *args: str, image_size: int = 16, channels: int = 3) -> Path:
    """Write a run of synthetic images into `folder`, with one checkpoint; return the folder."""
    size = (f"data.source.image_size={image_size}", f"data.image_size={image_size}", f"data.source.channels={channels}")
    width = f"model.width={1 if ':' in model else 0.125}"
    return write_of(folder, *SYNTHETIC, *size, f"model.name={model}", width, *args)


def write_of(folder: Path, *args: str) -> Path:
    """Write a run of the recipe that `args` make of `digits` into `folder`, as `write` does."""
    folder.mkdir(parents=True)
    recipe = load("digits", Patch.parse(["parallel.device=cpu", *args])).recipe
    (folder / "recipe.yaml").write_text(to_yaml_text(recipe.to_dict()))
    train = build_datasets(recipe.data.source, may_download=False).train
    (folder / "dataset.json").write_text(json.dumps(TrainedDataset.from_source(train).to_dict()))
    torch.manual_seed(0)
    network = build_model(recipe.model, num_classes=train.info.num_classes, channels=train.info.channels)
    roughen(network)
    snapshot = Snapshot({"model": model_tensors(network), "optimizer": {}}, {"train": {"best_step": STEP}})
    CheckpointStorage(folder / "checkpoints", KeepPolicy(9)).save(STEP, STEP, snapshot)
    (folder / "evals.jsonl").write_text("".join(json.dumps(each) + "\n" for each in EVALS))
    (folder / "classes.csv").write_text(CLASSES)
    (folder / "machine.json").write_text(json.dumps(MACHINE))
    (folder / "plan.json").write_text(json.dumps({"train_images": 64, "val_images": 200}))
    return folder


def roughen(network: nn.Module) -> None:
    """Give batch norms statistics and scales as training does: with those of a new one, one left out is not seen."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
