"""Stochastic depth: which samples are dropped, and the expectation."""

import pytest
import torch
from torch import nn

from paceline.models.layers import DropPath, append_drop_path, build_drop_path, linear_drop_rates


def test_each_sample_is_kept_whole_or_left_out_whole():
    torch.manual_seed(0)
    x = torch.rand(200, 3, 4, 4) + 1
    out = DropPath(0.75)(x)
    kept = out.flatten(1).count_nonzero(dim=1)
    assert set(kept.tolist()) == {0, 3 * 4 * 4}
    assert torch.equal(out[kept > 0], x[kept > 0] * 4)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_expectation_is_kept(probability):
    """The mean of n kept-or-dropped ones has a standard error of sqrt(p / (1 - p) / n); five of them."""
    torch.manual_seed(0)
    num_samples = 40_000
    mean = DropPath(probability)(torch.ones(num_samples, 1)).mean().item()
    assert mean == pytest.approx(1, abs=5 * (probability / (1 - probability) / num_samples) ** 0.5)


def test_evaluation_draws_nothing_and_changes_nothing():
    x = torch.randn(8, 2)
    before = torch.get_rng_state()
    assert DropPath(0.9).eval()(x) is x
    assert torch.equal(torch.get_rng_state(), before)


def test_the_global_generator_alone_decides():
    x = torch.ones(64, 1)
    layer = DropPath(0.5)
    torch.manual_seed(3)
    first = layer(x)
    other = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    assert not torch.equal(other, first)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_dtype_stays(dtype):
    assert DropPath(0.5)(torch.ones(4, 2, dtype=dtype)).dtype == dtype


def test_probability_zero_is_no_layer():
    branch = nn.Sequential(nn.ReLU())
    assert isinstance(build_drop_path(0.0), nn.Identity)
    assert len(append_drop_path(branch, 0.0)) == 1
    assert isinstance(append_drop_path(branch, 0.1)[1], DropPath)


def test_rates_rise_linearly_to_the_last_block():
    assert linear_drop_rates(0.2, 4) == [0.05, 0.1, 0.2 * 3 / 4, 0.2]
    assert linear_drop_rates(0.0, 3) == [0.0, 0.0, 0.0]
