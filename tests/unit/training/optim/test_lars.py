"""LARS against its paper's formula in NumPy, and against timm's where they agree."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from timm import optim as timm

from paceline.recipe.schema.optim import Lars
from paceline.training.optim.build import build_optimizer


def formula(section, name, weights):
    velocity = np.zeros_like(weights)
    is_spared = weights.ndim < 2
    decay = 0.0 if is_spared and not section.decay_norm_and_bias else section.weight_decay
    while True:
        gradient, lr = yield weights
        length, slope = np.linalg.norm(weights), np.linalg.norm(gradient)
        trust = section.trust * length / (slope + decay * length + section.eps) if length and slope else 1.0
        update = lr * (1.0 if is_spared else trust) * (gradient + decay * weights)
        velocity = section.momentum * velocity + update
        weights = weights - (section.momentum * velocity + update if section.nesterov else velocity)


@pytest.mark.parametrize(
    "section",
    [
        Lars(trust=0.02, weight_decay=0.1),
        Lars(trust=0.02, weight_decay=0.1, decay_norm_and_bias=False),
        Lars(trust=0.02, weight_decay=0.0, nesterov=True, eps=0.1),
        Lars(trust=0.02, momentum=0.0),
    ],
    ids=["decay", "spared", "nesterov", "no momentum"],
)
def test_lars_follows_its_formula(section, walk, assert_same):
    assert_same(walk.follow(section), walk.reckon(partial(formula, section)))


def test_lars_at_one_learning_rate_is_timms(walk, assert_same):
    steady = dataclasses.replace(walk, lrs=(0.05,) * len(walk.lrs))  # timm's momentum does not hold the rate
    parameters = steady.parameters()
    groups = [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "always_adapt": True, "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    theirs = timm.Lars([{**group, "lr_factor": 1.0} for group in groups], lr=0.05, momentum=0.9, trust_coeff=0.02)
    section = Lars(trust=0.02, weight_decay=0.1, decay_norm_and_bias=False)
    assert_same(steady.follow(section), steady.take(theirs, parameters))


def test_norms_and_biases_take_sgds_step():
    bias = torch.nn.Parameter(torch.full((3,), 2.0))
    bias.grad = torch.tensor([1.0, -2.0, 4.0])
    build_optimizer(Lars(lr=0.5, weight_decay=0.0), [("bias", bias)], "cpu").step()
    assert torch.equal(bias.detach(), torch.tensor([1.5, 3.0, 0.0]))
