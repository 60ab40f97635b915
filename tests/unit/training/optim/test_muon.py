"""Muon against its formula in NumPy, and against torch's own on matrices."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from paceline.recipe.schema.optim import Muon
from paceline.training.optim.muon import Muon as MuonOptimizer


def orthogonal(value, steps):
    x = value / np.linalg.norm(value)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def formula(section, name, weights):
    velocity = np.zeros_like(weights)
    is_matrix = weights.ndim >= 2 and name != "classifier"
    decay = 0.0 if weights.ndim < 2 and not section.decay_norm_and_bias else section.weight_decay
    factor = {0: section.classifier_lr, 1: section.norm_and_bias_lr}[int(weights.ndim < 2)]
    while True:
        gradient, lr = yield weights
        momentum = section.momentum if is_matrix else section.sgd_momentum
        velocity = momentum * velocity + gradient
        step = gradient + momentum * velocity if section.nesterov or not is_matrix else velocity
        if not is_matrix:
            rate = lr * section.sgd_lr / section.lr * factor
            weights = (1 - rate * decay) * weights - rate * step
            continue
        flat = step.reshape(len(step), -1)
        turned = orthogonal(flat, section.newton_schulz_steps) if np.any(flat) else flat
        if section.rescale:
            weights = weights * np.sqrt(len(weights)) / np.linalg.norm(weights)
        else:
            turned = turned * np.sqrt(max(1.0, flat.shape[0] / flat.shape[1]))
        weights = (1 - lr * decay) * weights - lr * turned.reshape(weights.shape)


@pytest.mark.parametrize(
    "section",
    [
        Muon(weight_decay=0.1, classifier_lr=0.5),
        Muon(weight_decay=0.1, decay_norm_and_bias=False, norm_and_bias_lr=3.0, nesterov=False),
        Muon(rescale=True, newton_schulz_steps=3),
        Muon(rescale=True, weight_decay=0.1, sgd_momentum=0.0, momentum=0.0, nesterov=False),
    ],
    ids=["decay", "spared", "rescaled", "rescaled decay"],
)
def test_muon_follows_its_formula(section, walk, assert_same):
    assert_same(walk.follow(section), walk.reckon(partial(formula, section)))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(24, 8), (8, 24)], ids=["tall", "wide"])
def test_muon_on_a_matrix_is_torchs(nesterov, shape):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    group = {"params": [ours], "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov, "lr_factor": 1.0}
    one = MuonOptimizer([group], lr=0.05, newton_schulz_steps=5, rescale=False)
    other = torch.optim.Muon([theirs], 0.05, weight_decay=0.1, momentum=0.9, nesterov=nesterov, ns_steps=5)
    for _ in range(5):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        one.step()
        other.step()
    # Both iterate in bfloat16 but round elsewhere: 2^-8 of an entry a product, grown by the 3.4 the quintic lifts by.
    moved = (ours - start).norm()
    assert moved > 0.5
    assert (ours - theirs).norm() < 0.02 * moved


def test_filters_of_zeros_are_not_scaled_to_nan():
    filters = nn.Parameter(torch.zeros(4, 2, 3, 3))
    filters.grad = torch.zeros_like(filters)
    MuonOptimizer([{"params": [filters]}], lr=0.1, newton_schulz_steps=5, rescale=True).step()
    assert torch.equal(filters.detach(), torch.zeros_like(filters))


def test_channels_last_filters_move_alike():
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(8, 4, 3, 3, generator=generator) for _ in range(2))
    moved = []
    for layout in (torch.contiguous_format, torch.channels_last):
        filters = nn.Parameter(start.clone(memory_format=layout))
        filters.grad = gradient.to(memory_format=layout)
        options = {"newton_schulz_steps": 5, "rescale": False, "dtype": torch.float64}
        MuonOptimizer([{"params": [filters]}], lr=0.1, **options).step()
        assert filters.is_contiguous(memory_format=layout)
        moved.append(filters.detach().contiguous())
    # torch's strided and vectorized kernels differ by a rounding of float32.
    torch.testing.assert_close(*moved, rtol=1e-6, atol=1e-6)
