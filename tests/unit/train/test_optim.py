"""Optimizers: which parameters decay, and that ours are torch's."""

import pytest
import torch
from torch import nn

from paceline.recipe.schema.optim import Adam, AdamW, Sgd
from paceline.train.optim import build_optimizer, set_lr


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    torch.manual_seed(1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("section", "reference"),
    [
        (Sgd(lr=0.05, nesterov=True), lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=5e-4, nesterov=True)),
        (Adam(lr=0.01, weight_decay=0.1), lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1)),
        (AdamW(lr=0.01), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.01)),
    ],
    ids=["sgd", "adam", "adamw"],
)
def test_an_optimizer_does_what_torchs_does(section: Sgd | Adam, reference: object) -> None:
    ours, theirs = net(), net()
    updated = train(ours, build_optimizer(section, ours))
    expected = train(theirs, reference(theirs.parameters()))  # type: ignore[operator]
    assert all(torch.equal(one, other) for one, other in zip(updated, expected, strict=True))


def test_norms_and_biases_are_spared_from_decay_when_asked() -> None:
    model = net()
    groups = build_optimizer(Sgd(decay_norm_and_bias=False), model).param_groups
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    spared = {name for name, parameter in model.named_parameters() if decay[id(parameter)] == 0}
    assert spared == {"0.bias", "1.weight", "1.bias", "3.bias"}
    assert len(decay) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out() -> None:
    model = net()
    model[0].requires_grad_(False)
    groups = build_optimizer(Sgd(), model).param_groups
    assert sum(len(group["params"]) for group in groups) == 4


def test_the_learning_rate_reaches_every_group() -> None:
    optimizer = build_optimizer(Sgd(decay_norm_and_bias=False), net())
    set_lr(optimizer.param_groups, 0.7)
    assert [group["lr"] for group in optimizer.param_groups] == [0.7, 0.7]
