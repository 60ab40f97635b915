"""The native crop and flip equal torch bit for bit, in one pass or two; without the core torch runs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.data.augment.geometric import Augment, BatchAffine, BatchFlip, BatchPadCrop, FusedCropFlip, fuse_crop_flip
from paceline.data.native import NativeExtension, load_native

TURN = BatchAffine(15.0, 0.0, (1.0, 1.0), "nearest")


@pytest.fixture
def core() -> NativeExtension:
    found = load_native()
    if found is None:
        pytest.skip("the native core was not built")
    return found


def images(num: int, channels: int, height: int, width: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(num).integers(0, 256, (num, channels, height, width), np.uint8))


def apply_separately(augments: tuple[Augment, ...], pixels: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    used = 0
    for augment in augments:
        pixels = augment(pixels, draws[:, used : used + augment.num_draws])
        used += augment.num_draws
    return pixels


AUGMENTS: dict[str, tuple[Augment, ...]] = {
    "crop": (BatchPadCrop(4, "zeros"),),
    "reflected": (BatchPadCrop(3, "reflect"),),
    "flip": (BatchFlip(0.5),),
    "flip always": (BatchFlip(1.0),),
    "crop and flip": (BatchPadCrop(4, "zeros"), BatchFlip(0.5)),
    "reflected and flip": (BatchPadCrop(2, "reflect"), BatchFlip(0.25)),
    "padding as wide as the image": (BatchPadCrop(8, "zeros"), BatchFlip(0.5)),
}


@pytest.mark.parametrize(
    "shape", [(9, 3, 32, 32), (4, 1, 28, 28), (5, 3, 8, 8), (3, 1, 17, 33), (2, 3, 40, 9)], ids=str
)
@pytest.mark.parametrize("name", AUGMENTS)
def test_the_fused_pass_equals_separate_steps_bit_for_bit(
    core: NativeExtension, name: str, shape: tuple[int, int, int, int]
) -> None:
    augments, pixels = AUGMENTS[name], images(*shape)
    (fused,) = fuse_crop_flip(augments, core)
    assert isinstance(fused, FusedCropFlip) and fused.num_draws == sum(augment.num_draws for augment in augments)
    draws = torch.from_numpy(np.random.default_rng(1).random((shape[0], fused.num_draws)))
    before = pixels.clone()
    assert torch.equal(fused(pixels, draws), apply_separately(augments, pixels, draws))
    assert torch.equal(pixels, before)


@pytest.mark.parametrize("name", AUGMENTS)
def test_fused_gathering_equals_gathering_first_bit_for_bit(core: NativeExtension, name: str) -> None:
    augments, pixels = AUGMENTS[name], images(20, 3, 32, 32)
    (fused,) = fuse_crop_flip(augments, core)
    assert isinstance(fused, FusedCropFlip)
    indices = np.array([3, 19, 0, 3, 7], dtype=np.int64)
    draws = np.random.default_rng(1).random((5, fused.num_draws))
    expected = apply_separately(augments, pixels[torch.from_numpy(indices)], torch.from_numpy(draws))
    assert torch.equal(fused.gather(pixels.numpy(), indices, draws), expected)


@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2**-32])
def test_extreme_draws_give_the_corners(core: NativeExtension, draw: float) -> None:
    augments, pixels = AUGMENTS["crop and flip"], images(4, 3, 16, 16)
    draws = torch.full((4, 3), draw, dtype=torch.float64)
    assert torch.equal(fuse_crop_flip(augments, core)[0](pixels, draws), apply_separately(augments, pixels, draws))


def test_an_empty_batch_stays_empty(core: NativeExtension) -> None:
    moved = fuse_crop_flip(AUGMENTS["crop and flip"], core)[0](
        torch.empty(0, 3, 8, 8, dtype=torch.uint8), torch.empty(0, 3)
    )
    assert moved.shape == (0, 3, 8, 8) and moved.dtype == torch.uint8


def test_images_larger_than_the_core_s_limit_are_augmented_by_torch(core: NativeExtension) -> None:
    pixels = images(1, 1, 2, 5000)
    (fused,) = fuse_crop_flip((BatchFlip(1.0),), core)
    assert torch.equal(fused(pixels, torch.zeros(1, 1, dtype=torch.float64)), pixels.flip(3))


def test_only_a_flip_directly_after_a_crop_is_fused(core: NativeExtension) -> None:
    crop, flip = BatchPadCrop(4, "zeros"), BatchFlip(0.5)
    assert fuse_crop_flip((flip, crop, TURN, crop, flip, flip), core) == (
        FusedCropFlip(core, None, flip),
        FusedCropFlip(core, crop, None),
        TURN,
        FusedCropFlip(core, crop, flip),
        FusedCropFlip(core, None, flip),
    )


def test_an_alternating_flip_is_fused_as_any_other(core: NativeExtension) -> None:
    """Only its draws differ."""
    flip = replace(BatchFlip(0.5), alternating=True)
    assert fuse_crop_flip((flip,), core) == (FusedCropFlip(core, None, flip),)


def test_without_the_core_nothing_is_fused() -> None:
    augments = AUGMENTS["crop and flip"]
    assert fuse_crop_flip(augments, None) == augments
