"""Models and optimizers come back from a checkpoint with the same bits, in their own layout and precision."""

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.core.errors import CheckpointError
from paceline.training.checkpoint import (
    CheckpointStorage,
    KeepPolicy,
    Snapshot,
    load_model,
    load_optimizer,
    load_tensor_group,
    model_tensors,
    optimizer_tensors,
    weights_sha256,
)


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


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    tensors = {"model": model_tensors(model), "optimizer": optimizer_tensors(optimizer)}
    return CheckpointStorage(folder, KeepPolicy(3)).save(3, 3, Snapshot(tensors, {}))


def sha256(model: nn.Module) -> str:
    return weights_sha256(model_tensors(model))


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["sgd with momentum", "sgd", "adamw"])
def test_training_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path, kind: int) -> None:
    model = net()
    optimizer = optimizers(model)[kind]
    torch.manual_seed(3)
    train(model, optimizer, 3)
    path = save(tmp_path, model, optimizer)
    torch.manual_seed(4)
    train(model, optimizer, 3)

    other = net(seed=9)
    resumed = optimizers(other)[kind]
    load_model(path, other)
    load_optimizer(resumed, load_tensor_group(path, "optimizer"))
    torch.manual_seed(4)
    train(other, resumed, 3)
    assert sha256(other) == sha256(model)


def test_the_digest_sees_parameters_and_buffers() -> None:
    model = net()
    before = sha256(model)
    assert sha256(net()) == before
    model[1].running_mean[0] += 1
    assert sha256(model) != before
    assert sha256(net(seed=1)) != before


def test_the_digest_is_of_values_and_not_of_their_layout() -> None:
    assert sha256(net().to(memory_format=torch.channels_last)) == sha256(net())


def test_the_optimizers_state_comes_back_in_the_layout_of_its_parameters() -> None:
    model = net().to(memory_format=torch.channels_last)
    optimizer = optimizers(model)[0]
    train(model, optimizer, 1)
    resumed = optimizers(model)[0]
    load_optimizer(resumed, {name: each.contiguous() for name, each in optimizer_tensors(optimizer).items()})
    for parameter, values in resumed.state.items():
        assert values["momentum_buffer"].stride() == parameter.stride()
    assert len(resumed.state) == 6


def test_the_optimizers_state_keeps_its_precision_beside_narrower_weights() -> None:
    model = nn.Linear(3, 3, bias=False).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    exact = {"0.momentum_buffer": torch.full((3, 3), 1.0 + 2**-20)}
    load_optimizer(optimizer, exact)
    assert torch.equal(optimizer_tensors(optimizer)["0.momentum_buffer"], exact["0.momentum_buffer"])


def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    model = net()
    path = save(tmp_path, model, optimizers(model)[0])
    with pytest.raises(CheckpointError, match="does not fit the model") as caught:
        load_model(path, nn.Sequential(nn.Linear(2, 2)))
    assert "\n" not in str(caught.value)
