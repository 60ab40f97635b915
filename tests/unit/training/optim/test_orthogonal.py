"""The Newton-Schulz iteration: what it does to singular values, and that batching changes nothing."""

import numpy as np
import pytest
import torch

from paceline.training.optim.muon import orthogonalize, update_scale


def matrix(rows, columns, dtype=torch.float64):
    return torch.randn(rows, columns, dtype=dtype, generator=torch.Generator().manual_seed(rows * 100 + columns))


def iterated(value, steps):
    """Return the formula on the singular values, in NumPy: x <- 3.4445 x - 4.775 x^3 + 2.0315 x^5, a step."""
    left, spectrum, right = np.linalg.svd(value / np.linalg.norm(value), full_matrices=False)
    for _ in range(steps):
        spectrum = 3.4445 * spectrum - 4.7750 * spectrum**3 + 2.0315 * spectrum**5
    return left @ np.diag(spectrum) @ right


@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (5, 5), (1, 4), (4, 1)])
@pytest.mark.parametrize("steps", [1, 5])
def test_the_quintic_acts_on_the_singular_values(shape, steps):
    value = matrix(*shape)
    (found,) = orthogonalize([value], steps=steps, dtype=torch.float64)
    np.testing.assert_allclose(found.numpy(), iterated(value.numpy(), steps), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_five_steps_bring_all_singular_values_near_one(dtype):
    value = matrix(64, 24, torch.float32)
    (found,) = orthogonalize([value], steps=5, dtype=dtype)
    spectrum = torch.linalg.svdvals(found)
    assert found.dtype == torch.float32
    # The source states 0.7 to 1.2; bfloat16's three digits widen that a little.
    assert spectrum.min() > 0.65 and spectrum.max() < 1.25


def test_a_batch_does_to_each_what_is_done_to_one():
    several = [matrix(4, 6), matrix(6, 4), matrix(5, 5), matrix(4, 6) * 100]
    together = orthogonalize(several, steps=5, dtype=torch.float64)
    for alone, found in zip(several, together, strict=True):
        (expected,) = orthogonalize([alone], steps=5, dtype=torch.float64)
        assert found.shape == alone.shape
        # A batched product may add in another order.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_a_matrix_of_zeros_stays_one():
    (found,) = orthogonalize([torch.zeros(3, 4)], steps=5, dtype=torch.float32)
    assert torch.equal(found, torch.zeros(3, 4))


def test_a_tall_update_is_longer():
    assert update_scale(torch.Size((64, 16))) == 2.0
    assert update_scale(torch.Size((16, 64))) == 1.0
