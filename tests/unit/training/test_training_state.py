"""State of gradient compression in a checkpoint: restored, dropped with a note, or refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.core.errors import CheckpointError
from paceline.parallel.strategy import SingleDevice
from paceline.recipe.schema.optim import Constant
from paceline.training.checkpoint import CheckpointStorage, KeepPolicy
from paceline.training.lr_schedule import build_lr_schedule
from paceline.training.optim.extra_state import ExtraOptimizerState
from paceline.training.precision import Precision
from paceline.training.saver import TrainingState
from paceline.training.state import TrainState


@pytest.fixture
def persistent() -> TrainingState:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = build_lr_schedule(Constant(), SimpleNamespace(peak_lr=0.1, steps=lambda duration: 0))
    precision, extra_state = Precision("cpu", torch.float32), ExtraOptimizerState.from_optimizer(optimizer, "sgd")
    return TrainingState(model, optimizer, schedule, precision, None, SingleDevice(), extra_state)


def saved(persistent: TrainingState, folder: Path, **values: Any) -> Path:
    return CheckpointStorage(folder, KeepPolicy(1)).save(1, 1, persistent.state_dict(TrainState(), values))


def test_one_rank_has_no_comm_state(persistent: TrainingState, tmp_path: Path) -> None:
    path = saved(persistent, tmp_path)
    assert "compression" not in json.loads((path / "state.json").read_text())
    assert not (path / "compression.safetensors").exists()
    assert persistent.load_comm_state(path) == ""


def test_one_rank_drops_the_comm_state_of_several_with_a_note(persistent: TrainingState, tmp_path: Path) -> None:
    path = saved(persistent, tmp_path, compression={"ranks": 4, "steps": 12, "buckets": [["weight", "bias"]]})
    assert (
        persistent.load_comm_state(path)
        == "resumed without PowerSGD's residuals of 4 ranks: a single rank sends no gradients"
    )


@pytest.mark.parametrize("odd", [[1], {"steps": 3}, "x"])
def test_invalid_comm_state_is_refused_in_one_line(persistent: TrainingState, tmp_path: Path, odd: object) -> None:
    path = saved(persistent, tmp_path, compression=odd)
    with pytest.raises(CheckpointError, match=r"another run or paceline version: [^\n]+ \(start a new run\)$"):
        persistent.load_comm_state(path)
