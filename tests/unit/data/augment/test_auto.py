"""RandAugment and TrivialAugment: every operation, at any magnitude, is torchvision's."""

import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from paceline.data.augment.auto import AutoAugment, build_rand_augment, build_trivial_augment

RAND, TRIVIAL = v2.RandAugment(), v2.TrivialAugmentWide()
SPACES = {"rand": (build_rand_augment(2, 9), RAND), "trivial": (build_trivial_augment(), TRIVIAL)}
NAMES = list(RAND._AUGMENTATION_SPACE)
MOVING = {"ShearX", "ShearY", "Rotate"}


def make_images(num: int = 6, channels: int = 3, height: int = 32, width: int = 32) -> torch.Tensor:
    """Return smooth images and noise, half and half: noise alone has only flat histograms."""
    generator = torch.Generator().manual_seed(5)
    coarse = torch.rand((num, channels, 4, 4), generator=generator)
    smooth = F.resize(coarse, [height, width]).mul(200).to(torch.uint8)
    noise = torch.randint(0, 256, (num, channels, height, width), dtype=torch.uint8, generator=generator)
    return torch.cat([smooth[: num // 2], noise[num // 2 :]])


def drawn(augment: AutoAugment, operation: int, magnitude: int, *, negative: bool) -> list[float]:
    """Return draws in the middle of the intervals that select the operation, magnitude and sign."""
    span = augment.highest - augment.lowest + 1
    return [(operation + 0.5) / 14, (magnitude - augment.lowest + 0.5) / span, 0.25 if negative else 0.75]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("channels", [1, 3])
def test_each_operation_is_torchvisions_at_each_magnitude_and_sign(space: str, name: str, channels: int) -> None:
    _, theirs = SPACES[space]
    images = make_images(4, channels, height=24, width=32)
    magnitudes, signed = theirs._AUGMENTATION_SPACE[name]
    table = magnitudes(31, 24, 32)
    for number in (1, 9, 15, 30):
        ours = build_rand_augment(1, number) if space == "rand" else build_trivial_augment()
        for negative in (False, True):
            magnitude = 0.0 if table is None else float(table[number]) * (-1 if negative and signed else 1)
            draws = torch.tensor([drawn(ours, NAMES.index(name), number, negative=negative)], dtype=torch.float64)
            result = ours(images, draws.expand(len(images), -1))
            expected = [_torchvisions(theirs, image, name, magnitude) for image in images]
            wrong = (result != torch.stack(expected)).float().mean().item()
            # A pixel read from halfway between two may be either, by the last bit; all else is equal to the bit.
            assert wrong <= (0.02 if name in MOVING else 0), f"{name} {magnitude}: {wrong}"


def _torchvisions(theirs: v2.RandAugment, image: torch.Tensor, name: str, magnitude: float) -> torch.Tensor:
    interpolation = v2.InterpolationMode.NEAREST
    return theirs._apply_image_or_video_transform(image, name, magnitude, interpolation=interpolation, fill={})


@pytest.mark.parametrize("space", SPACES)
def test_the_operations_are_torchvisions_in_its_order(space: str) -> None:
    ours, theirs = SPACES[space]
    names = [operation.name.replace("_", "") for operation in ours.operations]
    assert names == [name.lower() for name in theirs._AUGMENTATION_SPACE] and len(names) == 14
    assert [operation.is_signed for operation in ours.operations] == [
        signed for _, signed in theirs._AUGMENTATION_SPACE.values()
    ]


def test_operations_follow_each_other_in_the_drawn_order() -> None:
    augment, images = build_rand_augment(2, 9), make_images()
    solarize, equalize = NAMES.index("Solarize"), NAMES.index("Equalize")
    forth = drawn(augment, solarize, 9, negative=False) + drawn(augment, equalize, 9, negative=False)
    draws = torch.tensor([forth, forth[3:] + forth[:3]] * 3, dtype=torch.float64)
    threshold = float(torch.linspace(1, 0, 31)[9]) * 255
    for number, (image, result) in enumerate(zip(images, augment(images, draws), strict=True)):
        first, second = F.equalize(F.solarize(image, threshold)), F.solarize(F.equalize(image), threshold)
        assert torch.equal(result, second if number % 2 else first)


def test_trivial_augment_draws_every_operation_and_magnitude_evenly() -> None:
    """The first and the last of each lie at the ends of the draws."""
    augment = build_trivial_augment()
    images = make_images(2)
    ends = torch.tensor([[2**-33, 0.0, 0.0], [1 - 2**-32, 1 - 2**-32, 1 - 2**-32]], dtype=torch.float64)
    result = augment(images, ends)
    assert torch.equal(result[0], images[0]) and torch.equal(result[1], F.equalize(images[1]))
    assert (augment.lowest, augment.highest, augment.num_draws) == (0, 30, 3)


def test_rand_augment_has_one_magnitude_for_all() -> None:
    augment, images = build_rand_augment(1, 14), make_images(2)
    draws = torch.tensor([drawn(augment, NAMES.index("Posterize"), 14, negative=True)] * 2, dtype=torch.float64)
    draws[1, 1] = 0.0
    assert torch.equal(augment(images, draws), F.posterize(images, round(8 - 14 / 7.5)))
