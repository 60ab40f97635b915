"""Operations on tensors that have Pillow's pixels to the bit, as timm and DeiT III apply them."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import timm.data.auto_augment as timm_augment
import torch
from PIL import Image, ImageFilter, ImageOps
from torchvision.transforms.v2 import functional as F

from paceline.data.augment.build import build_augments
from paceline.data.augment.pillow import BatchThreeAugment, GaussianBlur, TimmRandAugment, build_timm_rand_augment
from paceline.recipe.schema.data import Data

FILL = (124, 116, 104)
MEAN = (0.485, 0.456, 0.406)
NAMES = timm_augment._RAND_INCREASING_TRANSFORMS


def make_images(num: int = 6, channels: int = 3, height: int = 33, width: int = 40) -> torch.Tensor:
    """Return smooth images, noise, and one of a single color."""
    generator = torch.Generator().manual_seed(5)
    smooth = F.resize(torch.rand((num, channels, 4, 4), generator=generator), [height, width]).mul(200)
    noise = torch.randint(0, 256, (num, channels, height, width), dtype=torch.uint8, generator=generator)
    images = torch.cat([smooth[: num // 2].to(torch.uint8), noise[num // 2 :]])
    images[-1] = 90
    return images


def to_pillow(image: torch.Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy())


def from_pillow(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.atleast_3d(np.array(image)).copy()).permute(2, 0, 1)


def by_pillow(images: torch.Tensor, change: Callable[[Image.Image], Image.Image]) -> torch.Tensor:
    return torch.stack([from_pillow(change(to_pillow(image))) for image in images])


def timms(name: str, magnitude: float, deviation: float = 0.0) -> timm_augment.AugmentOp:
    parameters = {"img_mean": FILL, "interpolation": Image.Resampling.BILINEAR, "magnitude_std": deviation}
    return timm_augment.AugmentOp(name, prob=1.0, magnitude=magnitude, hparams=parameters)


def rand_augment(magnitude: float, num_ops: int = 1, deviation: float = 0.0, p: float = 1.0) -> TimmRandAugment:
    return build_timm_rand_augment(num_ops, magnitude, deviation, p, FILL)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_negative", [False, True])
def test_each_operation_has_timms_pixels(name: str, is_negative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm_augment, "_randomly_negate", lambda value: -value if is_negative else value)
    images = make_images()
    for magnitude in (0.5, 3.0, 6.0, 7.0, 7.37, 8.9):
        draws = [(NAMES.index(name) + 0.5) / 15, 0.5, 0.5, 0.25 if is_negative else 0.75]
        ours = rand_augment(magnitude)(images, torch.tensor([draws], dtype=torch.float64).expand(len(images), -1))
        assert torch.equal(ours, by_pillow(images, timms(name, magnitude))), magnitude


def test_a_sampled_batch_has_timms_choices_and_magnitudes() -> None:
    """Each operation is as frequent, and its amounts have the same distribution, as timm's over 20,000 images."""
    augment, num = rand_augment(7, num_ops=2, deviation=0.5, p=0.5), 20_000
    draws = torch.from_numpy(np.random.default_rng(1).random((num, augment.num_draws)))
    taken: dict[int, list[float]] = {number: [] for number in range(15)}
    recording = [
        type(each)(
            lambda images, amounts, number=number: taken[number].extend(amounts.tolist()) or images, each.amounts
        )
        for number, each in enumerate(augment.operations)
    ]
    type(augment)(tuple(recording), 2, 7, 0.5, 0.5)(torch.zeros(num, 1, 2, 2, dtype=torch.uint8), draws)

    random.seed(2)
    np.random.seed(2)
    theirs: dict[int, list[float]] = {number: [] for number in range(15)}
    transform = timm_augment.rand_augment_transform("rand-m7-mstd0.5-inc1", {"img_mean": FILL})
    for number, each in enumerate(transform.ops):
        each.aug_fn = lambda image, *amounts, number=number, **_: theirs[number].append(*(amounts or (0.0,))) or image
    for _ in range(num):
        transform(None)
    for number, name in enumerate(NAMES):
        ours, other = np.array(taken[number]), np.array(theirs[number])
        assert len(ours) == pytest.approx(num / 15, rel=0.1) and len(other) == pytest.approx(num / 15, rel=0.1)
        if name not in ("AutoContrast", "Equalize", "Invert"):
            spread = max(other.std(), 1e-9)
            assert abs(ours.mean() - other.mean()) < 0.12 * spread, name
            assert ours.std() == pytest.approx(other.std(), rel=0.1), name
            assert np.quantile(ours, [0.1, 0.9]) == pytest.approx(np.quantile(other, [0.1, 0.9]), abs=0.3 * spread)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_blur_is_pillows_at_any_radius(channels: int) -> None:
    for size in ((33, 40), (5, 3)):
        images = make_images(6, channels, *size)
        for largest, radii in ((2.0, (0.1, 0.5, 1.0, 1.37, 1.9, 2.0)), (6.0, (0.3, 2.0, 2.5, 4.1, 5.0, 6.0))):
            ours = GaussianBlur(largest)(images, torch.tensor(radii, dtype=torch.float64))
            for image, result, radius in zip(images, ours, radii, strict=True):
                assert torch.equal(result, from_pillow(to_pillow(image).filter(ImageFilter.GaussianBlur(radius)))), (
                    radius
                )


def test_three_augment_is_that_of_deit_iii() -> None:
    """`augment.py` of DeiT: luma, `ImageOps.solarize`, and a blur by 0.1 to 2 pixels, each with a third."""
    images, draws = make_images(6), torch.tensor([[0.1, 0.5], [0.4, 0.5], [0.7, 0.25]] * 2, dtype=torch.float64)
    changes = [
        lambda image: image.convert("L").convert("RGB"),
        ImageOps.solarize,
        lambda image: image.filter(ImageFilter.GaussianBlur(0.1 + 0.25 * 1.9)),
    ]
    for image, result, change in zip(images, BatchThreeAugment()(images, draws), changes * 2, strict=True):
        assert torch.equal(result, from_pillow(change(to_pillow(image))))


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ({"name": "grayscale", "p": 0.3}, lambda image: image.convert("L").convert("RGB")),
        ({"name": "solarize", "p": 0.3, "threshold": 70}, lambda image: ImageOps.solarize(image, 70)),
        ({"name": "gaussian_blur", "p": 0.3, "sigma": (1, 3)}, lambda image: image.filter(ImageFilter.GaussianBlur(2))),
        ({"name": "vertical_flip", "p": 0.3}, ImageOps.flip),
    ],
)
def test_an_operation_is_applied_with_its_probability(section: dict, change) -> None:
    (augment,) = build_augments(Data(augment=(section,)).augment, MEAN)  # type: ignore[arg-type]
    images = make_images(5)[:2]
    draws = torch.full((2, augment.num_draws), 0.5, dtype=torch.float64)
    draws[0, 0], draws[1, 0] = 0.2999, 0.3
    result = augment(images, draws)
    assert torch.equal(result[0], by_pillow(images[:1], change)[0]) and torch.equal(result[1], images[1])


def test_color_jitter_with_a_probability_leaves_the_other_images() -> None:
    half, whole = (
        build_augments(Data(augment=({"name": "color_jitter", "p": p},)).augment, MEAN)[0]  # type: ignore[arg-type]
        for p in (0.5, 1)
    )
    images, draws = make_images(), torch.from_numpy(np.random.default_rng(3).random((6, 6)))
    assert (half.num_draws, whole.num_draws) == (6, 5)
    expected = torch.where((draws[:, 5] < 0.5)[:, None, None, None], whole(images, draws[:, :5]), images)
    assert torch.equal(half(images, draws), expected) and not torch.equal(expected, images)


@pytest.mark.parametrize("name", ["rand_augment_timm", "three_augment", "auto_augment", "augmix", "grayscale"])
def test_gray_images_and_groups_of_any_size_are_changed_image_by_image(name: str) -> None:
    for channels in (1, 3):
        (augment,) = build_augments(Data(augment=(name,)).augment, MEAN[:channels])  # type: ignore[arg-type]
        images = make_images(8, channels)
        draws = torch.from_numpy(np.random.default_rng(4).random((8, augment.num_draws)))
        whole = augment(images, draws)
        assert whole.shape == images.shape and whole.dtype == torch.uint8
        single = [augment(images[row : row + 1], draws[row : row + 1]) for row in range(8)]
        assert torch.equal(whole, torch.cat(single))
