"""Augmentation: what a sample becomes depends on its own draws, and the draws do what torchvision does."""

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from paceline.data.augment import Augment, ColorJitter, Flip, PadCrop, Turn, build_augments
from paceline.recipe.schema.recipe import Data

ALL = Data(
    augment=(  # type: ignore[arg-type]
        "pad_crop",
        {"name": "pad_crop", "padding": 2, "mode": "reflect"},
        "flip",
        "rotate",
        {"name": "rotate", "degrees": 30, "interpolation": "bilinear"},
        {"name": "affine", "shear_degrees": 10, "scale": [0.8, 1.2]},
        "color_jitter",
        {"name": "color_jitter", "hue": 0.1},
    )
)


def pictures(num: int = 12, channels: int = 3, size: int = 17) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (num, channels, size, size), dtype=torch.uint8, generator=generator)


def draws(augment: Augment, num: int = 12) -> np.ndarray:
    return np.random.default_rng(7).random((num, augment.num_draws))


@pytest.mark.parametrize("augment", build_augments(ALL.augment), ids=lambda augment: type(augment).__name__)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_sample_does_not_depend_on_the_rest_of_its_batch(augment: Augment, channels: int) -> None:
    images, values = pictures(channels=channels), draws(augment)
    whole = augment(images, values)
    assert whole.dtype == torch.uint8 and whole.shape == images.shape
    for index in range(len(images)):
        alone = augment(images[index : index + 1], values[index : index + 1])
        assert torch.equal(alone[0], whole[index])


def test_all_augments_are_built() -> None:
    assert len(build_augments(ALL.augment)) == len(ALL.augment) == 8


def test_pad_crop_cuts_the_padded_image_at_the_drawn_place() -> None:
    images = pictures(num=2)
    padded = F.pad(images, [4, 4, 4, 4])
    cut = PadCrop(4, "zeros")(images, np.array([[0.0, 0.999], [0.5, 0.5]]))
    assert torch.equal(cut[0], padded[0, :, 0:17, 8:25])
    assert torch.equal(cut[1], images[1])


def test_flip_mirrors_where_the_draw_is_below_its_probability() -> None:
    images = pictures(num=2)
    flipped = Flip(0.3)(images, np.array([[0.29], [0.31]]))
    assert torch.equal(flipped[0], images[0].flip(2))
    assert torch.equal(flipped[1], images[1])


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_turning_equals_torchvisions_rotation(interpolation: str) -> None:
    images = pictures(num=3)
    turned = Turn(20.0, 0.0, (1.0, 1.0), interpolation)(images, np.array([[0.0, 0, 0], [0.5, 0, 0], [0.9, 0, 0]]))
    for image, result, degrees in zip(images, turned, [-20.0, 0.0, 16.0], strict=True):
        expected = F.rotate(image, degrees, interpolation=InterpolationMode(interpolation))
        difference = (result.int() - expected.int()).abs()
        # A pixel that lies halfway between two may be read from either; bilinear differs by rounding.
        assert (difference > 1).float().mean() < 0.01
    assert torch.equal(turned[1], images[1])


def test_shear_and_zoom_equal_torchvisions_affine() -> None:
    images = pictures(num=2)
    values = np.array([[0.5, 0.9, 0.25], [0.5, 0.1, 0.75]])
    sheared = Turn(0.0, 10.0, (0.8, 1.2), "nearest")(images, values)
    for image, result, shear, zoom in zip(images, sheared, [8.0, -8.0], [0.9, 1.1], strict=True):
        options = [
            F.affine(image, angle=0.0, translate=[0, 0], scale=zoom, shear=[sign * shear, 0.0]) for sign in (1, -1)
        ]
        assert min((result != option).float().mean().item() for option in options) < 0.01


def test_colour_jitter_with_centred_draws_changes_nothing() -> None:
    images = pictures(num=2)
    assert torch.equal(ColorJitter(0.4, 0.4, 0.4, 0.0)(images, np.full((2, 5), 0.5)), images)


def test_colour_jitter_applies_torchvisions_changes_in_the_drawn_order() -> None:
    image = pictures(num=1)
    result = ColorJitter(0.4, 0.4, 0.4, 0.0)(image, np.array([[0.75, 0.25, 0.5, 0.5, 0.0]]))
    expected = F.adjust_contrast(F.adjust_brightness(image[0], 1.2), 0.8)
    assert torch.equal(result[0], F.adjust_saturation(expected, 1.0))
