"""Checkpoints: whole or not at all, damage found, nothing unpickled."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.core.errors import CheckpointError
from paceline.core.results import EvalResult
from paceline.train.checkpoint import Checkpoints, load_model, load_rest, read_state, weights_sha256
from paceline.train.schedule import Plateau
from paceline.train.state import TrainState


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        torch.optim.SGD(model.parameters(), 0.1),
        torch.optim.AdamW(model.parameters(), 0.01),
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 8, 8)).square().mean().backward()
        optimizer.step()


def plateau() -> Plateau:
    return Plateau(0.1, 0, 0.0, 0.2, 1, 1e-4)


def state(step: int, best_step: int = -1) -> TrainState:
    result = EvalResult(images=10, top1=0.5, top5=1.0, loss=1.5)
    return TrainState(step, step * 8, result, step, result, best_step, hits=1, trained_s=2.5)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, at: TrainState, keep: int = 3) -> Path:
    return Checkpoints(folder, keep).save(at, model, optimizer, plateau(), {"recipe_hash": "abc"})


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["sgd with momentum", "sgd", "adamw"])
def test_training_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path, kind: int) -> None:
    model = net()
    optimizer = optimizers(model)[kind]
    torch.manual_seed(3)
    train(model, optimizer, 3)
    path = save(tmp_path, model, optimizer, state(3))
    torch.manual_seed(4)
    train(model, optimizer, 3)

    other = net(seed=9)
    resumed = optimizers(other)[kind]
    load_model(path, other)
    assert load_rest(path, resumed, plateau()) == state(3)
    torch.manual_seed(4)
    train(other, resumed, 3)
    assert weights_sha256(other) == weights_sha256(model)


def test_the_digest_sees_parameters_and_buffers() -> None:
    model = net()
    before = weights_sha256(model)
    assert weights_sha256(net()) == before
    model[1].running_mean[0] += 1
    assert weights_sha256(model) != before
    assert weights_sha256(net(seed=1)) != before


def test_the_schedules_state_comes_back(tmp_path: Path) -> None:
    model, seen = net(), plateau()
    seen.observe(0.3)
    path = Checkpoints(tmp_path, 3).save(state(1), model, optimizers(model)[0], seen, {})
    other = plateau()
    load_rest(path, optimizers(net())[0], other)
    assert other == seen


def test_no_temporary_is_left_and_one_left_by_a_kill_is_no_checkpoint(tmp_path: Path) -> None:
    model = net()
    (tmp_path / ".step-00000005.tmp").mkdir()
    assert Checkpoints(tmp_path, 3).newest() is None
    path = save(tmp_path, model, optimizers(model)[0], state(5))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000005"]
    assert Checkpoints(tmp_path, 3).newest() == path


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    model = net()
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, model, optimizers(model)[0], state(step, best_step=2), keep=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000002", "step-00000004", "step-00000005"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damage_to_any_file_is_found_and_named(tmp_path: Path, name: str, damage: str) -> None:
    model = net()
    path = save(tmp_path, model, optimizers(model)[0], state(1))
    file = path / name
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:-1])
    else:
        file.unlink()
    with pytest.raises(CheckpointError) as caught:
        load_model(path, net())
    assert name in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


def test_a_manifest_that_lists_nothing_vouches_for_nothing(tmp_path: Path) -> None:
    model = net()
    path = save(tmp_path, model, optimizers(model)[0], state(1))
    for text in ("{}", "[]", "null"):
        (path / "manifest.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"manifest.json does not list"):
            load_model(path, net())


def test_the_optimizers_state_comes_back_in_the_layout_of_its_parameters(tmp_path: Path) -> None:
    model = net().to(memory_format=torch.channels_last)
    optimizer = optimizers(model)[0]
    train(model, optimizer, 1)
    path = save(tmp_path, model, optimizer, state(1))
    resumed = optimizers(model)[0]
    load_rest(path, resumed, plateau())
    for parameter, values in resumed.state.items():
        assert values["momentum_buffer"].stride() == parameter.stride()
    assert len(resumed.state) == 6


def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    model = net()
    path = save(tmp_path, model, optimizers(model)[0], state(1))
    with pytest.raises(CheckpointError, match="does not fit the model") as caught:
        load_model(path, nn.Sequential(nn.Linear(2, 2)))
    assert "\n" not in str(caught.value)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    model = net()
    path = save(tmp_path, model, optimizers(model)[0], state(1))
    values = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(values | {"format_version": 99}))
    with pytest.raises(CheckpointError, match="has format 99"):
        read_state(path)


def test_a_pickle_in_place_of_the_weights_runs_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (canary,)  # type: ignore[return-value]

    model = net()
    path = save(tmp_path / "run", model, optimizers(model)[0], state(1))
    (path / "model.safetensors").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError):
        load_model(path, net())
    assert not canary.exists()
