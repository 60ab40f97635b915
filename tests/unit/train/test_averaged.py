"""`train.averaged`: the average that a checkpoint keeps is there without the optimizer it was trained with."""

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.core.errors import CheckpointError
from paceline.recipe.load import load
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe
from paceline.train.average import ExponentialAverage
from paceline.train.averaged import averaged
from paceline.train.checkpoint import Checkpoints, Keep, Snapshot
from paceline.train.precision import build_precision

FP32 = build_precision("fp32", torch.device("cpu"))
GONE = "optim={name: 'nowhere.parts:Optim', lr: 0.1}"


def recipe(*words: str) -> Recipe:
    return load("digits", Patch.parse(words)).recipe


def saved(folder: Path, **parts: dict[str, torch.Tensor]) -> Path:
    snapshot = Snapshot({"model": {}, "optimizer": {}, **parts}, {"train": {"best_step": -1}})
    Checkpoints(folder, Keep(1)).save(1, -1, snapshot)
    return next(folder.iterdir())


def test_an_average_needs_no_optimizer_of_anybodys_own(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    kept = ExponentialAverage(other, 0.5, 1, warmup=False).tensors()
    found = averaged(recipe(GONE, "train.ema={decay: 0.5}"), model, FP32, saved(tmp_path, average=kept))
    assert found.exists
    with found.swapped():
        assert torch.equal(model.weight, other.weight)
    assert not torch.equal(model.weight, other.weight)


def test_without_an_average_the_checkpoint_is_not_even_looked_at(tmp_path: Path) -> None:
    assert not averaged(recipe(GONE), nn.Linear(2, 2), FP32, tmp_path / "nowhere").exists


def test_an_average_that_is_not_kept_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^train.ema: .* keeps no averaged weights \(set train.ema=off\)$"):
        averaged(recipe("train.ema={decay: 0.5}"), nn.Linear(2, 2), FP32, saved(tmp_path))
