"""Augmentation: each sample depends on its own draws alone, as torchvision's functions compute it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from paceline.data.augment.build import build_augments, has_host_augments, split_augments
from paceline.data.augment.color import BatchColorJitter, adjust_hue
from paceline.data.augment.geometric import Augment, BatchAffine, BatchFlip, BatchPadCrop
from paceline.recipe.schema.data import Data

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
        {"name": "flip", "mode": "alternating"},
        {"name": "rand_augment", "num_ops": 3, "magnitude": 20},
        "trivial_augment",
        {"name": "random_erasing", "p": 0.7},
        {"name": "cutout", "size": 5},
    )
)
OTHERS = Data(augment=("random_resized_crop", "flip", "mixup", "cutmix"))  # type: ignore[arg-type]
MEAN = {1: (0.4,), 3: (0.4, 0.5, 0.6)}


def make_images(num: int = 12, channels: int = 3, size: int = 17) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (num, channels, size, size), dtype=torch.uint8, generator=generator)


def draws(augment: Augment, num: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.rand((num, augment.num_draws), dtype=torch.float64, generator=generator)


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("number", range(len(ALL.augment)), ids=lambda number: f"{number}-{ALL.augment[number].name}")
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [17, 40])
def test_a_sample_does_not_depend_on_the_rest_of_its_batch(number: int, channels: int, size: int) -> None:
    """Neither on the other images, nor on its position."""
    augment = build_augments(ALL.augment, MEAN[channels])[number]
    images, values = make_images(32, channels, size), draws(augment, 32)
    whole = augment(images, values)
    assert whole.dtype == torch.uint8 and whole.shape == images.shape
    assert not torch.equal(whole, images)
    for index in range(len(images)):
        alone = augment(images[index : index + 1], values[index : index + 1])
        assert torch.equal(alone[0], whole[index])
    backwards = augment(images.flip(0), values.flip(0))
    assert torch.equal(backwards.flip(0), whole)


@pytest.mark.parametrize("number", range(len(ALL.augment)), ids=lambda number: f"{number}-{ALL.augment[number].name}")
def test_an_augment_does_not_modify_its_input(number: int) -> None:
    augment = build_augments(ALL.augment, MEAN[3])[number]
    images = make_images()
    augment(images, draws(augment))
    assert torch.equal(images, make_images())


def test_all_augments_are_built() -> None:
    assert len(build_augments(ALL.augment, MEAN[3])) == len(ALL.augment) == 13


def test_resizing_and_mixing_are_not_built_as_augments() -> None:
    assert build_augments(OTHERS.augment, MEAN[3]) == (BatchFlip(0.5),)


def test_only_an_alternating_flip_has_alternating_draws() -> None:
    assert [augment.alternating for augment in build_augments(ALL.augment, MEAN[3])].index(True) == 8
    assert sum(augment.alternating for augment in build_augments(ALL.augment, MEAN[3])) == 1


def test_pad_crop_crops_the_padded_image_at_the_drawn_position() -> None:
    images = make_images(num=2)
    padded = F.pad(images, [4, 4, 4, 4])
    cut = BatchPadCrop(4, "zeros")(images, rows([0.0, 0.999], [0.5, 0.5]))
    assert torch.equal(cut[0], padded[0, :, 0:17, 8:25])
    assert torch.equal(cut[1], images[1])


def test_flip_mirrors_where_the_draw_is_below_its_probability() -> None:
    images = make_images(num=2)
    flipped = BatchFlip(0.3)(images, rows([0.29], [0.31]))
    assert torch.equal(flipped[0], images[0].flip(2))
    assert torch.equal(flipped[1], images[1])


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_rotation_equals_torchvisions(interpolation: str) -> None:
    images = make_images(num=3)
    turned = BatchAffine(20.0, 0.0, (1.0, 1.0), interpolation)(images, rows([0.0, 0, 0], [0.5, 0, 0], [0.9, 0, 0]))
    for image, result, degrees in zip(images, turned, [-20.0, 0.0, 16.0], strict=True):
        expected = F.rotate(image, degrees, interpolation=InterpolationMode(interpolation))
        difference = (result.int() - expected.int()).abs()
        # A pixel that lies halfway between two may be read from either; bilinear differs by rounding.
        assert (difference > 1).float().mean() < 0.01
    assert torch.equal(turned[1], images[1])


def test_shear_and_zoom_equal_torchvisions_affine() -> None:
    images = make_images(num=2)
    values = rows([0.5, 0.9, 0.25], [0.5, 0.1, 0.75])
    sheared = BatchAffine(0.0, 10.0, (0.8, 1.2), "nearest")(images, values)
    for image, result, shear, zoom in zip(images, sheared, [8.0, -8.0], [0.9, 1.1], strict=True):
        options = [
            F.affine(image, angle=0.0, translate=[0, 0], scale=zoom, shear=[sign * shear, 0.0]) for sign in (1, -1)
        ]
        assert min((result != option).float().mean().item() for option in options) < 0.01


def test_colour_jitter_with_centred_draws_changes_nothing() -> None:
    images = make_images(num=2)
    assert torch.equal(
        BatchColorJitter(0.4, 0.4, 0.4, 0.0)(images, torch.full((2, 5), 0.5, dtype=torch.float64)), images
    )


def test_colour_jitter_applies_torchvisions_changes_in_the_drawn_order() -> None:
    image = make_images(num=1)
    result = BatchColorJitter(0.4, 0.4, 0.4, 0.0)(image, rows([0.75, 0.25, 0.5, 0.5, 0.0]))
    expected = F.adjust_contrast(F.adjust_brightness(image[0], 1.2), 0.8)
    assert torch.equal(result[0], F.adjust_saturation(expected, 1.0))


@pytest.mark.parametrize("hue", [0.0, 0.2])
@pytest.mark.parametrize("size", [9, 33, 224])
def test_colour_jitter_of_a_batch_is_torchvisions_of_each_image_to_the_bit(hue: float, size: int) -> None:
    """Gray pixels too, of which an error in the last bit changes the value."""
    images = torch.cat([make_images(6, 3, size), make_images(6, 1, size).expand(-1, 3, -1, -1)])
    jitter = BatchColorJitter(0.4, 0.3, 0.2, hue)
    values = draws(jitter)
    for image, result, draw in zip(images, jitter(images, values), values.tolist(), strict=True):
        assert torch.equal(result, _jittered(image, draw, hue))


def _jittered(image: torch.Tensor, draw: list[float], hue: float) -> torch.Tensor:
    """Apply torchvision's functions one by one, in the permutation of the drawn number."""
    changes = [
        lambda image: F.adjust_brightness(image, 1 + (2 * draw[0] - 1) * 0.4),
        lambda image: F.adjust_contrast(image, 1 + (2 * draw[1] - 1) * 0.3),
        lambda image: F.adjust_saturation(image, 1 + (2 * draw[2] - 1) * 0.2),
        lambda image: F.adjust_hue(image, (2 * draw[3] - 1) * hue) if hue else image,
    ]
    number = int(draw[4] * 24)
    for left in (4, 3, 2, 1):
        number, place = divmod(number, left)
        image = changes.pop(place)(image)
    return image


def test_hue_of_a_batch_is_torchvisions_of_each_image_to_the_bit() -> None:
    """Random, gray, nearly gray and pure colors, and shifts beyond the color wheel."""
    images = torch.cat(
        [make_images(40), make_images(20, 1).expand(-1, 3, -1, -1), make_images(20) // 64, make_images(20) // 128 * 255]
    )
    generator = torch.Generator().manual_seed(3)
    shifts = torch.rand(100, dtype=torch.float64, generator=generator) - 0.5
    shifts[::4] = torch.tensor([0.0, 0.5, -0.5, 1e-9, -1e-9], dtype=torch.float64).repeat(5)
    for image, result, shift in zip(images, adjust_hue(images, shifts), shifts.tolist(), strict=True):
        assert torch.equal(result, F.adjust_hue(image, shift))


def test_hue_of_grey_images_stays() -> None:
    images = make_images(channels=1)
    assert torch.equal(adjust_hue(images, torch.full((12,), 0.3, dtype=torch.float64)), images)


class _Counting(TorchDispatchMode):
    """Count the operations that torch runs."""

    num = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        self.num += 1
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("number", range(len(ALL.augment)), ids=lambda number: f"{number}-{ALL.augment[number].name}")
def test_no_augment_loops_over_images(number: int) -> None:
    """The number of torch operations does not grow with the number of images."""
    augment = build_augments(ALL.augment, MEAN[3])[number]
    counted = []
    for num in (200, 800):
        with _Counting() as counting:
            augment(make_images(num, size=5), draws(augment, num))
        counted.append(counting.num)
    assert counted[0] == counted[1] > 0


def test_a_batch_needs_the_host_if_one_augment_does() -> None:
    needing = {
        section.name for section in (*ALL.augment, *OTHERS.augment) if has_host_augments(Data(augment=(section,)))
    }
    assert needing == {"color_jitter", "rand_augment", "trivial_augment", "random_resized_crop"}
    assert has_host_augments(Data(augment=("flip", "color_jitter", "mixup")))  # type: ignore[arg-type]
    assert not has_host_augments(Data())


def test_an_augment_that_needs_the_host_and_all_before_it_stay_on_the_host() -> None:
    names = ("pad_crop", "color_jitter", "flip", "cutout")
    augments = build_augments(Data(augment=names).augment, MEAN[3])  # type: ignore[arg-type]
    assert split_augments(augments, on_device=True) == (augments[:2], augments[2:])
    assert split_augments(augments, on_device=False) == (augments, ())
    assert split_augments(augments[2:], on_device=True) == ((), augments[2:])
