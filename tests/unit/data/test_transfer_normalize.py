"""Normalization is computed in float32 at least, for any dtype of the weights, and rounded once."""

import numpy as np
import pytest
import torch

from paceline.data.batch import Batch
from paceline.data.transfer import DeviceTransfer

MEAN, STD = (0.3047, 0.5071, 0.4865), (0.3756, 0.2673, 0.2564)
PIXELS = torch.arange(256, dtype=torch.uint8).repeat(3, 1).view(1, 3, 16, 16)


def normalised(dtype: torch.dtype) -> torch.Tensor:
    place = DeviceTransfer(torch.device("cpu"), dtype, MEAN, STD, torch.channels_last)
    images = place.normalize(PIXELS)
    assert images.dtype == dtype and images.is_contiguous(memory_format=torch.channels_last)
    return images


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_types_equal_float32_rounded_once(dtype: torch.dtype) -> None:
    assert torch.equal(normalised(dtype), normalised(torch.float32).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float32_and_float64_are_computed_in_themselves(dtype: torch.dtype) -> None:
    mean, std = (torch.tensor(values, dtype=dtype).view(1, 3, 1, 1) * 255 for values in (MEAN, STD))
    assert torch.equal(normalised(dtype), (PIXELS.to(dtype) - mean) * (1 / std))


def test_a_batch_on_the_device_is_not_copied() -> None:
    place = DeviceTransfer(torch.device("meta"), torch.float32, MEAN, STD, torch.channels_last)
    indices = np.arange(1)
    batch = place.to_device(Batch(PIXELS, torch.zeros(1, dtype=torch.int64), indices, torch.empty(1, 0)))
    placed = place(batch)
    assert placed.images is batch.images and placed.labels is batch.labels and placed.draws is batch.draws
    assert placed.images.device.type == "meta" and batch.indices is indices
