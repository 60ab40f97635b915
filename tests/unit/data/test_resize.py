"""Images of any size are resized to the input size of the model."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from paceline.data.resize import (
    CenterCropResizer,
    RandomCropResizer,
    Resizer,
    StretchResizer,
    build_eval_resizer,
    build_train_resizer,
)
from paceline.recipe.schema.data import Data

NO_DRAWS = np.empty(0)


def make_image(width: int, height: int) -> Image.Image:
    rows, columns = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([rows % 256, columns % 256, (rows + columns) % 256], 2).astype(np.uint8))


@pytest.mark.parametrize("size", [(500, 375), (75, 56), (411, 120), (1, 1), (3, 500)])
def test_every_resizer_returns_the_requested_size(size: tuple[int, int]) -> None:
    for resizer in (StretchResizer(), CenterCropResizer(0.875), RandomCropResizer((0.08, 1.0), (0.75, 4 / 3))):
        draws = np.random.default_rng(0).random(resizer.num_draws)
        result = resizer(make_image(*size), draws, 64)
        assert result.shape == (3, 64, 64) and result.dtype == torch.uint8


def test_evaluation_scales_the_short_side_and_crops_the_center() -> None:
    whole = make_image(500, 375)
    expected = F.center_crop(F.resize(whole, [256], antialias=True), [224, 224])
    assert torch.equal(CenterCropResizer(0.875)(whole, NO_DRAWS, 224), F.pil_to_tensor(expected))


@pytest.mark.parametrize("size", [(1, 30_000), (30_000, 1)])
def test_a_very_long_image_is_cropped_before_it_is_scaled(size: tuple[int, int]) -> None:
    """Scaled by its short side it would take 2 GB."""
    assert CenterCropResizer(0.875)(make_image(*size), NO_DRAWS, 224).shape == (3, 224, 224)


def test_cropping_a_long_image_first_hardly_changes_pixels() -> None:
    long = make_image(900, 100)
    expected = F.pil_to_tensor(F.center_crop(F.resize(long, [256], antialias=True), [224, 224]))
    assert (CenterCropResizer(0.875)(long, NO_DRAWS, 224).int() - expected.int()).abs().float().mean() < 1


def test_a_random_crop_is_inside_the_image_and_within_its_ranges() -> None:
    crop = RandomCropResizer((0.08, 1.0), (0.75, 4 / 3))
    rng = np.random.default_rng(1)
    areas = []
    for _ in range(2000):
        top, left, height, width = crop.choose_box(375, 500, rng.random(crop.num_draws))
        assert 0 <= top <= 375 - height and 0 <= left <= 500 - width
        assert 0.70 < width / height < 1.40
        areas.append(height * width / (375 * 500))
    assert 0.075 < min(areas) < 0.12 and 0.9 < max(areas) <= 1.0
    assert abs(float(np.mean(areas)) - _torchvision_mean_area()) < 0.02


def _torchvision_mean_area() -> float:
    """Return the mean share of the area that torchvision's own crop draws from the same image, in 2,000 crops."""
    torch.manual_seed(0)
    crop = v2.RandomResizedCrop(32)
    boxes = [crop.make_params([torch.empty(3, 375, 500)]) for _ in range(2000)]
    return float(np.mean([box["height"] * box["width"] / (375 * 500) for box in boxes]))


def test_an_image_too_long_for_any_attempt_gives_the_center() -> None:
    crop = RandomCropResizer((0.9, 1.0), (0.75, 4 / 3))
    top, left, height, width = crop.choose_box(10, 1000, np.full(crop.num_draws, 0.5))
    assert (top, height, width) == (0, 10, 13)
    assert left == (1000 - 13) // 2


def test_the_first_augmentation_selects_the_training_resizer() -> None:
    random, stretch = Data(augment=("random_resized_crop",)), Data(augment=("resize",))  # type: ignore[arg-type]
    for are_one_size in (False, True):
        assert isinstance(build_train_resizer(random, are_one_size=are_one_size), RandomCropResizer)
        assert isinstance(build_train_resizer(stretch, are_one_size=are_one_size), StretchResizer)
    assert isinstance(build_train_resizer(Data(), are_one_size=False), CenterCropResizer)
    assert isinstance(build_eval_resizer(random, are_one_size=False), CenterCropResizer)
    assert isinstance(build_eval_resizer(Data(eval_resize="stretch"), are_one_size=False), StretchResizer)


def test_images_of_one_size_are_not_cropped() -> None:
    for build in (build_train_resizer, build_eval_resizer):
        assert isinstance(build(Data(), are_one_size=True), StretchResizer)


SIZES = [
    (375, 500),
    (500, 375),
    (56, 75),
    (120, 411),
    (1, 1),
    (500, 3),
    (256, 256),
    (257, 256),
    (10, 1000),
    (3, 30_000),
]


def cut(image: Image.Image, box: list[float], size: int, *, inside: bool) -> torch.Tensor:
    """Return the `box` of an image resized by Pillow, whose filter also sees pixels around a box."""
    top, left, height, width = box
    if inside:
        image = image.crop((round(left), round(top), round(left + width), round(top + height)))
        top, left = 0, 0
    area = (left, top, left + width, top + height)
    return F.pil_to_tensor(image.resize((size, size), Image.Resampling.BILINEAR, box=area))


def test_the_regions_of_random_crops_equal_their_boxes_bit_for_bit() -> None:
    crop = RandomCropResizer((0.08, 1.0), (0.75, 4 / 3))
    rng = np.random.default_rng(2)
    sizes = np.concatenate([np.array(SIZES), rng.integers(1, 800, (3000, 2))])
    draws = rng.random((len(sizes), crop.num_draws))
    regions = crop.compute_regions(sizes, draws, 224)
    boxes = [crop.choose_box(*size, draw) for size, draw in zip(sizes.tolist(), draws, strict=True)]
    assert regions.is_inside and regions.boxes.dtype == np.float64
    assert np.array_equal(regions.boxes, np.array(boxes))


def test_regions_fall_back_to_the_center_if_no_attempt_fits() -> None:
    crop = RandomCropResizer((0.9, 1.0), (0.75, 4 / 3))
    draws = np.full((2, crop.num_draws), 0.5)
    assert crop.compute_regions(np.array([[10, 1000], [1000, 10]]), draws, 8).boxes.tolist() == [
        [0, (1000 - 13) // 2, 10, 13],
        [(1000 - 13) // 2, 0, 13, 10],
    ]


@pytest.mark.parametrize("share", [0.875, 1.0, 0.5])
@pytest.mark.parametrize("size", SIZES[:7])
def test_the_region_of_a_center_crop_gives_the_pixels_of_scaling_and_cropping(
    size: tuple[int, int], share: float
) -> None:
    """Pillow rounds between its two passes, in either order, so some pixels differ by one or two."""
    image = make_image(size[1], size[0])
    regions = CenterCropResizer(share).compute_regions(np.array([size]), np.empty((1, 0)), 64)
    assert not regions.is_inside
    expected = CenterCropResizer(share)(image, NO_DRAWS, 64)
    found = cut(image, regions.boxes[0].tolist(), 64, inside=False)
    assert (found.int() - expected.int()).abs().max() <= 2


@pytest.mark.parametrize("size", [(100, 30_000), (30_000, 100)])
def test_the_region_of_a_very_long_image_is_in_its_middle(size: tuple[int, int]) -> None:
    image = make_image(size[1], size[0])
    (box,) = CenterCropResizer(0.875).compute_regions(np.array([size]), np.empty((1, 0)), 32).boxes.tolist()
    difference = cut(image, box, 32, inside=False).int() - CenterCropResizer(0.875)(image, NO_DRAWS, 32).int()
    assert difference.abs().max() <= 2


def test_the_region_of_stretching_is_the_whole_image() -> None:
    regions = StretchResizer().compute_regions(np.array([[5, 7], [9, 2]]), np.empty((2, 0)), 32)
    assert regions.is_inside and regions.boxes.tolist() == [[0, 0, 5, 7], [0, 0, 9, 2]]


@pytest.mark.parametrize(
    "resizer", [StretchResizer(), CenterCropResizer(0.875), RandomCropResizer((0.08, 1.0), (0.75, 4 / 3))], ids=str
)
def test_an_empty_batch_has_no_regions(resizer: Resizer) -> None:
    boxes = resizer.compute_regions(np.empty((0, 2), dtype=np.int64), np.empty((0, resizer.num_draws)), 32).boxes
    assert boxes.shape == (0, 4)


def test_bicubic_images_are_pillows_in_training_and_evaluation() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (70, 90, 3)).astype(np.uint8))
    data = Data.model_validate({"interpolation": "bicubic", "eval_resize": "stretch", "augment": ["resize"]})
    expected = F.pil_to_tensor(image.resize((32, 32), Image.Resampling.BICUBIC))
    for build in (build_train_resizer, build_eval_resizer):
        assert torch.equal(build(data, are_one_size=False)(image, NO_DRAWS, 32), expected)
        bilinear = build(data.model_copy(update={"interpolation": "bilinear"}), are_one_size=False)
        assert not torch.equal(bilinear(image, NO_DRAWS, 32), expected)
    cropping = Data.model_validate({"interpolation": "bicubic", "augment": ["random_resized_crop"]})
    crop = build_train_resizer(cropping, are_one_size=False)
    assert isinstance(crop, RandomCropResizer)
    draws = np.random.default_rng(0).random(crop.num_draws)
    top, left, height, width = crop.choose_box(*F.get_size(image), draws)
    box = image.crop((left, top, left + width, top + height)).resize((32, 32), Image.Resampling.BICUBIC)
    assert torch.equal(crop(image, draws, 32), F.pil_to_tensor(box))
