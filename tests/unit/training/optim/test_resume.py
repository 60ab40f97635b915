"""What an optimizer keeps goes through a checkpoint, which holds its tensors and nothing else."""

import math

import pytest
import torch
from torch import nn

from paceline.recipe.schema.optim import Adam, AdamW, Lamb, Lars, Muon, NovoGrad, RmsProp, ScheduleFree, Sgd
from paceline.training.checkpoint import load_optimizer, optimizer_tensors
from paceline.training.optim.build import build_optimizer

SECTIONS = [
    *(Sgd(), Adam(), AdamW(), RmsProp(momentum=0.9, centered=True), NovoGrad(), Lars(trust=0.02), Lamb(), Muon()),
    ScheduleFree(lr=0.1),
]
RATES = [0.01, 0.03, 0.02, 0.02]


def net(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3)).to(dtype)


def step(model, optimizer, number):
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    for group in optimizer.param_groups:
        group["lr"] = RATES[number] * group["lr_factor"]
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_a_resumed_optimizer_takes_the_same_steps(section, dtype):
    model = net(dtype)
    optimizer = build_optimizer(section, model.named_parameters(), "cpu")
    for number in range(2):
        step(model, optimizer, number)

    other = net(dtype)
    other.load_state_dict(model.state_dict())
    resumed = build_optimizer(section, other.named_parameters(), "cpu")
    tensors = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer).items()}
    assert tensors
    load_optimizer(resumed, tensors)

    for number in range(2, 4):
        step(model, optimizer, number)
        step(other, resumed, number)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))


def test_a_count_survives_in_a_model_of_16_bits():
    model = net(torch.bfloat16)
    optimizer = build_optimizer(Lamb(), model.named_parameters(), "cpu")
    step(model, optimizer, 0)
    tensors = optimizer_tensors(optimizer)
    tensors["0.updates"].fill_(1001)  # bfloat16 has 1000 and 1004
    resumed = build_optimizer(Lamb(), model.named_parameters(), "cpu")
    load_optimizer(resumed, tensors)
    assert resumed.state[resumed.param_groups[0]["params"][0]]["updates"].item() == 1001


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_gradients_stay_as_they_are(section):
    model = net(torch.float32)
    optimizer = build_optimizer(section, model.named_parameters(), "cpu")
    for number in range(2):
        step(model, optimizer, number)
        generator = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            assert torch.equal(parameter.grad, torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_a_parameter_without_gradient_stays(section):
    model = net(torch.float32)
    optimizer = build_optimizer(section, model.named_parameters(), "cpu")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model[0].weight.grad = model[1].bias.grad = None
        optimizer.step()
    moved = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
    assert moved == [False, True, True, False, True, True]
    assert all(math.isfinite(parameter.sum().item()) for parameter in model.parameters())
