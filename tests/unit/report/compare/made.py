"""Runs to compare, as a run leaves them: what is read of them, and nothing else."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

RECIPE = """\
# recipe {hash}
seed: {seed}
data:
  source:
    name: cifar100
  batch_size: {batch}
  augment:
  - name: pad_crop
    padding: 4
model:
  name: resnet50_nersc
optim:
  name: sgd
  lr: {lr}
schedule:
  name: plateau
  warmup: {warmup}
train:
  epochs: 120.0
  precision: fp32
  stop: off
"""
GPU = "Tesla V100-SXM2-16GB"


@dataclass(frozen=True)
class Made:
    """A run whose accuracy rises linearly to `best` over `epochs` epochs of `epoch_s` seconds of 50,000 images."""

    batch: int = 128
    seed: int = 0
    warmup: str = "0ep"
    lr: float = 0.1
    ranks: int = 1
    best: float = 0.8
    epochs: int = 8
    epoch_s: float = 20.0
    images_per_s: float = 2600.0
    status: str = "completed"
    train_images: int = 50_000
    recipe: str = RECIPE
    torch: str = "2.15.0"
    code: str = "1a2b"
    own_parts: dict[str, Any] | None = None
    cores: int = 160
    spread: tuple[float, float] = (1.0, 2.0)
    num_classes: int = 100
    train_gap: float | None = None


def write(folder: Path, run: Made) -> Path:
    """Write a run directory into a new `folder`, finished unless its status is `unfinished`."""
    folder.mkdir(parents=True)
    text = run.recipe.format(hash="0123456789ab", seed=run.seed, batch=run.batch, lr=run.lr, warmup=run.warmup)
    (folder / "recipe.yaml").write_text(text)
    plan = {"world_size": run.ranks, "train_images": run.train_images, "val_images": 10_000,
            "num_classes": run.num_classes}  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan))
    machine = {"torch": run.torch, "paceline": "0.1.1.dev5+g1a2b3c4",
               "paceline_sha256": run.code, "cpu": "POWER9", "logical_cores": run.cores,
               "cuda_devices": [GPU] * run.ranks}  # fmt: skip
    (folder / "machine.json").write_text(json.dumps(machine))
    evals = [_evaluation(run, epoch) for epoch in range(1, run.epochs + 1)]
    lines(folder / "evals.jsonl", evals)
    lines(folder / "steps.jsonl", [{**each, "loss": math.exp(-each["epoch"])} for each in evals])
    if run.status != "unfinished":
        (folder / "result.json").write_text(json.dumps(_result(run)))
    return folder


def seeds(folder: Path, run: Made, accuracies: list[float]) -> list[Path]:
    """Write a run a seed, each with its own best accuracy."""
    return [
        write(folder / f"b{run.batch}-{run.warmup}-s{seed}", replace(run, seed=seed, best=best))
        for seed, best in enumerate(accuracies)
    ]


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _evaluation(run: Made, epoch: int) -> dict[str, Any]:
    accuracy = run.best * epoch / run.epochs
    train_eval = (
        {}
        if run.train_gap is None
        else {"train_top1": accuracy + run.train_gap, "train_loss": 1 - accuracy - run.train_gap}
    )
    return {**train_eval, "step": epoch * run.train_images // run.batch, "epoch": float(epoch),
            "images_seen": epoch * run.train_images, "trained_s": epoch * run.epoch_s, "images": 10_000,
            "top1": accuracy, "top5": min(1.0, accuracy + 0.15), "loss": 1 - accuracy}  # fmt: skip


def _result(run: Made) -> dict[str, Any]:
    wall_s = run.epochs * run.epoch_s
    times = {"wall_s": wall_s, "startup_s": 5.0, "train_s": wall_s, "eval_s": 1.0, "checkpoint_s": 0.0,
             "to_target_s": None}  # fmt: skip
    return {"status": run.status, "recipe_hash": "0123456789ab", "world_size": run.ranks, "epochs": run.epochs,
            "steps": 100, "images_seen": run.epochs * run.train_images, "eval": None, "best": None,
            "throughput": {"images_per_s": run.images_per_s, "spread": run.spread, "n": 9, "excluded_s": 0.0},
            "time": times, "stages": {}, "verdict": {}, "lr": "0.1", "weights_sha256": "0" * 64,
            "provenance": {"device": "cuda", **({"own_parts": run.own_parts} if run.own_parts else {})}}  # fmt: skip
