"""Parameters that are unfrozen later take their first step as if the optimizer had just been created."""

import pytest
import torch
from torch import nn

from paceline.recipe.load import Patch, load
from paceline.training.optim.build import build_optimizer

STEPS = 5


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"backbone": nn.Linear(3, 4), "head": nn.Linear(4, 2)})


def fill_gradients(module: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "lars", "novograd", "rmsprop", "muon"])
def test_the_first_step_of_late_parameters_is_that_of_a_new_optimizer(name: str) -> None:
    section = load("synthetic", Patch.parse([f"optim.name={name}", "optim.lr=0.1"])).recipe.optim
    whole, fresh = model(), model()
    late = {f"backbone.{each}" for each, _ in whole["backbone"].named_parameters()}
    optimizer = build_optimizer(section, whole.named_parameters(), "cpu", late=late)
    groups = [{id(each) for each in group["params"]} for group in optimizer.param_groups]
    backbone = {id(each) for each in whole["backbone"].parameters()}
    assert all(group <= backbone or not group & backbone for group in groups) and len(groups) > 1
    for step in range(STEPS):
        fill_gradients(whole["head"], step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert all(map(torch.equal, whole["backbone"].parameters(), fresh["backbone"].parameters()))
    for module, stepped in (
        (whole, optimizer),
        (fresh, build_optimizer(section, fresh.named_parameters(), "cpu", late=late)),
    ):
        fill_gradients(module["backbone"], STEPS)
        stepped.step()
    assert all(map(torch.equal, whole["backbone"].parameters(), fresh["backbone"].parameters()))
    assert not torch.equal(whole["backbone"].weight, model()["backbone"].weight)
