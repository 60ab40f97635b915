"""The native core moves pixels as torch does, to the bit, in one pass or two; without it torch does."""

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


def in_steps(augments: tuple[Augment, ...], pixels: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
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
def test_moving_gives_the_bits_of_the_steps(core: NativeExtension, name: str, shape: tuple[int, int, int, int]) -> None:
    augments, pixels = AUGMENTS[name], images(*shape)
    (move,) = fuse_crop_flip(augments, core)
    assert isinstance(move, FusedCropFlip) and move.num_draws == sum(augment.num_draws for augment in augments)
    draws = torch.from_numpy(np.random.default_rng(1).random((shape[0], move.num_draws)))
    before = pixels.clone()
    assert torch.equal(move(pixels, draws), in_steps(augments, pixels, draws))
    assert torch.equal(pixels, before)


@pytest.mark.parametrize("name", AUGMENTS)
def test_gathering_on_the_way_gives_the_bits_of_gathering_first(core: NativeExtension, name: str) -> None:
    augments, pixels = AUGMENTS[name], images(20, 3, 32, 32)
    (move,) = fuse_crop_flip(augments, core)
    assert isinstance(move, FusedCropFlip)
    indices = np.array([3, 19, 0, 3, 7], dtype=np.int64)
    draws = np.random.default_rng(1).random((5, move.num_draws))
    expected = in_steps(augments, pixels[torch.from_numpy(indices)], torch.from_numpy(draws))
    assert torch.equal(move.gather(pixels.numpy(), indices, draws), expected)


@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2**-32])
def test_the_ends_of_the_draws_are_the_corners(core: NativeExtension, draw: float) -> None:
    augments, pixels = AUGMENTS["crop and flip"], images(4, 3, 16, 16)
    draws = torch.full((4, 3), draw, dtype=torch.float64)
    assert torch.equal(fuse_crop_flip(augments, core)[0](pixels, draws), in_steps(augments, pixels, draws))


def test_an_empty_batch_stays_empty(core: NativeExtension) -> None:
    moved = fuse_crop_flip(AUGMENTS["crop and flip"], core)[0](
        torch.empty(0, 3, 8, 8, dtype=torch.uint8), torch.empty(0, 3)
    )
    assert moved.shape == (0, 3, 8, 8) and moved.dtype == torch.uint8


def test_images_larger_than_the_core_takes_are_moved_all_the_same(core: NativeExtension) -> None:
    pixels = images(1, 1, 2, 5000)
    (move,) = fuse_crop_flip((BatchFlip(1.0),), core)
    assert torch.equal(move(pixels, torch.zeros(1, 1, dtype=torch.float64)), pixels.flip(3))


def test_only_what_follows_each_other_is_one_move(core: NativeExtension) -> None:
    crop, flip = BatchPadCrop(4, "zeros"), BatchFlip(0.5)
    assert fuse_crop_flip((flip, crop, TURN, crop, flip, flip), core) == (
        FusedCropFlip(core, None, flip),
        FusedCropFlip(core, crop, None),
        TURN,
        FusedCropFlip(core, crop, flip),
        FusedCropFlip(core, None, flip),
    )


def test_an_alternating_flip_is_moved_as_any_other(core: NativeExtension) -> None:
    """Its draws are other ones; what they do is the same."""
    flip = replace(BatchFlip(0.5), alternating=True)
    assert fuse_crop_flip((flip,), core) == (FusedCropFlip(core, None, flip),)


def test_without_the_core_the_steps_stay() -> None:
    augments = AUGMENTS["crop and flip"]
    assert fuse_crop_flip(augments, None) == augments
