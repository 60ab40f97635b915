"""Norms of layers: what 16-bit formats hold is added up in float32."""

import pytest
import torch

from paceline.training.optim.foreach import l2_norms


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [2000.0, 2.0**-14], ids=["large", "small"])
def test_norms_neither_overflow_nor_vanish_in_any_format(dtype, value):
    # 2000^2 is beyond float16, and so is the norm of 128,000; 2^-28 is below it. All formats hold both values.
    found = l2_norms([torch.full((4096,), value, dtype=dtype), torch.zeros(3, dtype=dtype)])
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    assert found.tolist() == [64 * value, 0.0]  # every partial sum is a small integer times a power of two: exact


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_16_bits_are_those_of_the_same_numbers_in_float32(dtype):
    layers = [torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype) for shape in ((7, 5), (3,))]
    assert torch.equal(l2_norms(layers), l2_norms([layer.float() for layer in layers]))
