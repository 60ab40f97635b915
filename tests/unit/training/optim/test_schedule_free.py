"""Schedule-free SGD against its paper's formula in NumPy, with z, x and y all kept."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch

from paceline.recipe.schema.optim import ScheduleFree
from paceline.training.optim.build import build_optimizer


def formula(section, averages, name, start):
    z, x = start, start
    lr_max, weight_sum = 0.0, 0.0
    decay = 0.0 if start.ndim < 2 and not section.decay_norm_and_bias else section.weight_decay
    while True:
        y = (1 - section.momentum) * z + section.momentum * x
        averages.setdefault(name, []).append(x)
        gradient, lr = yield y
        z = z - lr * (gradient + decay * y)
        lr_max = max(lr_max, lr)
        weight_sum += lr_max**2
        share = lr_max**2 / weight_sum if weight_sum else 0.0
        x = (1 - share) * x + share * z


@pytest.mark.parametrize(
    "section",
    [
        ScheduleFree(weight_decay=0.1),
        ScheduleFree(weight_decay=0.1, decay_norm_and_bias=False, momentum=0.5),
        ScheduleFree(weight_decay=0.0),
    ],
    ids=["decay", "spared", "no decay"],
)
@pytest.mark.parametrize("first_lr", [0.01, 0.0])
def test_schedule_free_follows_its_formula(section, first_lr, walk, assert_same):
    warm = dataclasses.replace(walk, lrs=(first_lr, *walk.lrs[1:]))
    assert_same(warm.follow(section), warm.reckon(partial(formula, section, {})))


def test_the_average_is_that_of_the_iterates(walk):
    section = ScheduleFree(weight_decay=0.1)
    averages = {}
    walk.reckon(partial(formula, section, averages))
    parameters = walk.parameters()
    optimizer = build_optimizer(section, parameters.items(), "cpu")
    walk.take(optimizer, parameters)
    for name, parameter in parameters.items():
        # x is read out of y and z, which magnifies their roundings ten times at most
        average = optimizer.average_of(parameter)
        np.testing.assert_allclose(average.numpy(), averages[name][-1], rtol=1e-10, atol=1e-11, err_msg=name)
        assert not average.requires_grad


def test_the_average_before_any_step_is_a_copy():
    weight = torch.nn.Parameter(torch.randn(3, 2))
    optimizer = build_optimizer(ScheduleFree(), [("weight", weight)], "cpu")
    average = optimizer.average_of(weight)
    assert torch.equal(average, weight) and average.data_ptr() != weight.data_ptr()
    assert not optimizer.state


def test_a_constant_rate_weighs_a_million_iterates_alike():
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    optimizer = build_optimizer(ScheduleFree(lr=0.3), [("weight", weight)], "cpu")
    optimizer.step()
    optimizer.state[weight]["iterates"].fill_(2**20)
    optimizer.step()
    assert optimizer.state[weight]["iterates"].item() == 2**20 + 1


def test_schedule_free_is_the_authors(walk, assert_same):
    schedulefree = pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    parameters = walk.parameters()
    groups = [{"params": list(parameters.values()), "lr_factor": 1.0}]
    theirs = schedulefree.SGDScheduleFree(groups, momentum=0.9, weight_decay=0.1)
    theirs.train()
    assert_same(walk.follow(ScheduleFree(weight_decay=0.1)), walk.take(theirs, parameters))
