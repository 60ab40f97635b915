"""`train.averaged`: the average that a checkpoint keeps is there without the optimizer it was trained with."""

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.core.errors import CheckpointError
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe
from paceline.training.checkpoint import CheckpointStorage, KeepPolicy, Snapshot, optimizer_tensors
from paceline.training.ema import ExponentialMovingAverage
from paceline.training.eval_model import load_weight_average
from paceline.training.optim.build import build_optimizer, layers_for_decay
from paceline.training.precision import build_precision

FP32 = build_precision("fp32", torch.device("cpu"))
GONE = "optim={name: 'nowhere.parts:Optim', lr: 0.1}"


def recipe(*overrides: str) -> Recipe:
    return load("digits", Patch.parse(overrides)).recipe


def saved(folder: Path, **parts: dict[str, torch.Tensor]) -> Path:
    snapshot = Snapshot({"model": {}, "optimizer": {}, **parts}, {"train": {"best_step": -1}})
    CheckpointStorage(folder, KeepPolicy(1)).save(1, -1, snapshot)
    return next(folder.iterdir())


def sections(*words: str) -> tuple[object, object]:
    asked = recipe(*words)
    return asked.train, asked.optim


def test_an_average_needs_no_optimizer_of_anybodys_own(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    kept = ExponentialMovingAverage(other, 0.5, 1, warmup=False).tensors()
    found = load_weight_average(*sections(GONE, "train.ema={decay: 0.5}"), model, FP32, saved(tmp_path, average=kept))
    assert found is not None
    with found.swapped():
        assert torch.equal(model.weight, other.weight)
    assert not torch.equal(model.weight, other.weight)


def test_the_average_of_an_optimizer_with_layer_decay_matches_its_parameters(tmp_path: Path) -> None:
    asked = recipe("optim={name: schedule_free, layer_decay: 0.5, norm_and_bias_lr: 2}", "schedule.name=constant")
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = build_optimizer(asked.optim, model.named_parameters(), "cpu", layers_for_decay(asked.optim, model))
    for _ in range(3):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    averages = [optimizer.average_of(parameter) for parameter in model.parameters()]
    found = load_weight_average(
        asked.train, asked.optim, model, FP32, saved(tmp_path, optimizer=optimizer_tensors(optimizer))
    )
    with found.swapped():
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), averages, strict=True))
    assert not torch.equal(model[0].weight, averages[0])


def test_without_an_average_the_checkpoint_is_not_even_looked_at(tmp_path: Path) -> None:
    assert load_weight_average(*sections(GONE), nn.Linear(2, 2), FP32, tmp_path / "nowhere") is None


def test_a_missing_average_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^train.ema: .* has no averaged weights \(set train.ema=off\)$"):
        load_weight_average(*sections("train.ema={decay: 0.5}"), nn.Linear(2, 2), FP32, saved(tmp_path))
