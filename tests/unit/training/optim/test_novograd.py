"""NovoGrad against its paper's formula in NumPy, and against timm's."""

from functools import partial

import numpy as np
import pytest
import torch
from timm import optim as timm

from paceline.recipe.schema.optim import NovoGrad
from paceline.training.optim.build import build_optimizer


def formula(section, name, weights):
    beta1, beta2 = section.betas
    mean, square = np.zeros_like(weights), None
    decay = 0.0 if weights.ndim < 2 and not section.decay_norm_and_bias else section.weight_decay
    share = 1 - beta1 if section.grad_averaging else 1.0
    while True:
        gradient, lr = yield weights
        energy = np.sum(gradient**2)
        square = energy if not square else beta2 * square + (1 - beta2) * energy
        mean = beta1 * mean + share * (gradient / (np.sqrt(square) + section.eps) + decay * weights)
        weights = weights - lr * mean


@pytest.mark.parametrize(
    "section",
    [
        NovoGrad(weight_decay=0.1),
        NovoGrad(weight_decay=0.1, decay_norm_and_bias=False, grad_averaging=True),
        NovoGrad(weight_decay=0.0, betas=(0.5, 0.0), eps=0.1),
    ],
    ids=["decay", "spared", "no decay"],
)
def test_novograd_follows_its_formula(section, walk, assert_same):
    assert_same(walk.follow(section), walk.reckon(partial(formula, section)))


@pytest.mark.parametrize("grad_averaging", [False, True])
def test_novograd_is_timms(grad_averaging, walk):
    parameters = walk.parameters()
    groups = [{"params": list(parameters.values()), "lr_factor": 1.0}]
    theirs = timm.NvNovoGrad(groups, betas=(0.9, 0.95), weight_decay=0.1, grad_averaging=grad_averaging)
    expected = walk.take(theirs, parameters)
    found = walk.follow(NovoGrad(betas=(0.9, 0.95), weight_decay=0.1, grad_averaging=grad_averaging))
    for one, other in zip(found, expected, strict=True):
        for name in parameters:
            # timm keeps the running square in float32: 6e-8 a step, times seven.
            np.testing.assert_allclose(one[name], other[name], rtol=1e-6, atol=1e-6, err_msg=name)


def test_a_layers_running_square_is_one_number_in_float32():
    weight = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float16))
    optimizer = build_optimizer(NovoGrad(), [("weight", weight)], "cpu")
    weight.grad = torch.full((3, 2), 1000.0, dtype=torch.float16)  # its square, 6e6, is beyond float16
    optimizer.step()
    square = optimizer.state[weight]["square"]
    assert square.shape == () and square.dtype == torch.float32
    assert square.item() == pytest.approx(6e6, rel=3e-7)  # roundings of float32: of the norm, twice as its square
    assert torch.isfinite(weight).all()


def test_a_first_gradient_of_zero_does_not_make_the_second_step_long():
    lengths = {}
    for first in (0.0, 1.0):
        weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
        section = NovoGrad(lr=1.0, betas=(0.95, 0.98), weight_decay=0.0)
        optimizer = build_optimizer(section, [("weight", weight)], "cpu")
        for gradient in (first, 1.0):
            before = weight.detach().clone()
            weight.grad = torch.full_like(weight, gradient)
            optimizer.step()
            lengths[first] = (weight.detach() - before).norm().item()
    # To the eps of 1e-8 beside a norm of 2.
    assert lengths[0.0] == pytest.approx(1.0, rel=1e-8)  # as the first step of all is
    assert lengths[1.0] == pytest.approx(1.95, rel=1e-8)
