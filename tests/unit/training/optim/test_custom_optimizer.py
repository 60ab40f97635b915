"""A user's own optimizer: of the same groups as ours, with the same options."""

import sys

import pytest
import torch
from torch import nn

from paceline.core.errors import RecipeError
from paceline.recipe.load import Patch, load
from paceline.recipe.schema.optim import OwnOptim, Sgd
from paceline.training.optim.build import build_optimizer, set_lr


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def test_torchs_own_is_made_with_the_groups_rates_and_args_of_the_recipe() -> None:
    section = OwnOptim(
        name="torch.optim:NAdam", lr=0.5, weight_decay=0.1, decay_norm_and_bias=False, norm_and_bias_lr=2.0,
        args={"eps": 1e-3},
    )  # fmt: skip
    net = model()
    optimizer = build_optimizer(section, net.named_parameters(), "cpu")
    assert isinstance(optimizer, torch.optim.NAdam)
    found = [(group["lr"], group["weight_decay"], group["eps"]) for group in optimizer.param_groups]
    assert found == [(0.5, 0.1, 1e-3), (1.0, 0.0, 1e-3)]
    set_lr(optimizer.param_groups, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]
    net(torch.ones(1, 3)).sum().backward()
    before = net.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(net.weight, before)


def test_what_is_no_optimizer_or_forgets_its_groups_is_refused(monkeypatch) -> None:
    module = type(sys)("parts_of_optim")
    module.none = lambda groups, lr: groups
    module.forgets = lambda groups, lr: torch.optim.SGD([each for group in groups for each in group["params"]], lr)
    monkeypatch.setitem(sys.modules, "parts_of_optim", module)
    for name, says in (("none", "makes a list, not a torch.optim.Optimizer"), ("forgets", "does not keep the groups")):
        section = OwnOptim(name=f"parts_of_optim:{name}", lr=0.1)
        with pytest.raises(RecipeError, match=f"optim.name: parts_of_optim:{name} {says}"):
            build_optimizer(section, model().named_parameters(), "cpu")


def test_an_argument_it_does_not_have_is_told() -> None:
    section = OwnOptim(name="torch.optim:NAdam", lr=0.1, args={"epsilon": 1.0})
    with pytest.raises(RecipeError, match=r"optim\.args\.epsilon: is not an argument of torch.optim:NAdam"):
        build_optimizer(section, model().named_parameters(), "cpu")


def test_one_that_calls_the_network_itself_is_refused_before_the_first_step() -> None:
    section = OwnOptim(name="torch.optim:LBFGS", lr=0.1)
    with pytest.raises(RecipeError, match=r"torch.optim:LBFGS cannot be used: its step\(\) needs more .*'closure'"):
        build_optimizer(section, [("weight", nn.Parameter(torch.zeros(2, 2)))], "cpu")


@pytest.mark.parametrize("section", [OwnOptim(name="torch.optim:NAdam", lr=0.1), Sgd(decay_norm_and_bias=False)])
def test_a_network_that_trains_nothing_is_refused(section) -> None:
    with pytest.raises(RecipeError, match=r"^model.name: the model has no trainable parameter \(give it one"):
        build_optimizer(section, model().requires_grad_(False).named_parameters(), "cpu")


def test_the_decay_is_the_groups_and_the_rate_is_said() -> None:
    with pytest.raises(RecipeError, match=r"optim: args.weight_decay has no effect, as each group has its own \(set"):
        load("digits", Patch.parse(["optim={name: 'torch.optim:NAdam', lr: 0.1, args: {weight_decay: 0.1}}"]))
    with pytest.raises(RecipeError, match=r"optim.lr: is needed"):
        load("digits", Patch.parse(["optim.name=torch.optim:NAdam"]))
