"""LAMB against its paper's formula in NumPy, and against timm's where they agree."""

from functools import partial

import numpy as np
import pytest
import torch
from timm import optim as timm

from paceline.recipe.schema.optim import Lamb
from paceline.training.optim.build import build_optimizer


def formula(section, name, weights):
    beta1, beta2 = section.betas
    mean, square, step = np.zeros_like(weights), np.zeros_like(weights), 0
    is_spared = weights.ndim < 2
    decay = 0.0 if is_spared and not section.decay_norm_and_bias else section.weight_decay
    while True:
        gradient, lr = yield weights
        step += 1
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        update = (mean / (1 - beta1**step)) / (np.sqrt(square / (1 - beta2**step)) + section.eps) + decay * weights
        length, step_length = np.linalg.norm(weights), np.linalg.norm(update)
        ratio = length / step_length if length and step_length and not is_spared else 1.0
        weights = weights - lr * ratio * update


@pytest.mark.parametrize(
    "section",
    [
        Lamb(weight_decay=0.1),
        Lamb(weight_decay=0.1, decay_norm_and_bias=False, eps=0.1),
        Lamb(weight_decay=0.0, betas=(0.8, 0.95)),
        Lamb(betas=(0.0, 0.0)),
    ],
    ids=["decay", "spared", "no decay", "no memory"],
)
def test_lamb_follows_its_formula(section, walk, assert_same):
    assert_same(walk.follow(section), walk.reckon(partial(formula, section)))


def test_lamb_is_timms_without_clipping(walk, assert_same):
    parameters = walk.parameters()
    groups = [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "always_adapt": True, "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    theirs = timm.Lamb([{**group, "lr_factor": 1.0} for group in groups], max_grad_norm=None)
    section = Lamb(weight_decay=0.1, decay_norm_and_bias=False)
    assert_same(walk.follow(section), walk.take(theirs, parameters))


def test_the_bias_correction_is_good_in_float32():
    bias = torch.nn.Parameter(torch.zeros(4))
    bias.grad = torch.full((4,), 1e-3)
    build_optimizer(Lamb(lr=1.0, weight_decay=0.0, eps=1e-12), [("bias", bias)], "cpu").step()
    # The first corrected step is 1, and 5e-7 four roundings. A correction of 1 - 0.999 in float32 would be 6e-6 off.
    torch.testing.assert_close(bias.detach(), torch.full((4,), -1.0), rtol=0, atol=5e-7)
