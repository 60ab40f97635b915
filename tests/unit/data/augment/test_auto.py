"""AutoAugment, RandAugment, TrivialAugment and AugMix: every operation, at any magnitude, is torchvision's."""

import hashlib
import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from paceline.data.augment.auto import (
    RandomOperations,
    build_augmix,
    build_auto_augment,
    build_rand_augment,
    build_trivial_augment,
)

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


def drawn(augment: RandomOperations, operation: int, magnitude: int, *, negative: bool) -> list[float]:
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


POLICIES = {"imagenet": v2.AutoAugmentPolicy.IMAGENET, "cifar10": v2.AutoAugmentPolicy.CIFAR10}
POLICIES["svhn"] = v2.AutoAugmentPolicy.SVHN


@pytest.mark.parametrize("policy", POLICIES)
def test_each_pair_of_a_policy_is_torchvisions(policy: str) -> None:
    ours, theirs = build_auto_augment(policy), v2.AutoAugment(POLICIES[policy])
    images = make_images(4, height=24, width=32)
    wrong = 0.0
    for number, pair in enumerate(theirs._policies):
        for first, second, sign in itertools.product((False, True), (False, True), (0.25, 0.75)):
            apply = [
                (p * 0.99 if is_applied else p + 1e-6)
                for (_, p, _), is_applied in zip(pair, (first, second), strict=True)
            ]
            draws = torch.tensor([[(number + 0.5) / 25, apply[0], sign, apply[1], sign]], dtype=torch.float64)
            expected = []
            for image in images:
                for (name, p, level), is_applied in zip(pair, (first, second), strict=True):
                    magnitudes, is_signed = theirs._AUGMENTATION_SPACE[name]
                    table = magnitudes(10, 24, 32)
                    magnitude = float(table[level]) if level is not None else 0.0
                    magnitude *= -1 if is_signed and sign < 0.5 else 1
                    if is_applied and p:
                        image = _torchvisions(theirs, image, name, magnitude)
                expected.append(image)
            result = ours(images, draws.expand(len(images), -1))
            wrong = max(wrong, (result != torch.stack(expected)).float().mean().item())
    # A pixel read from halfway between two may be either, by the last bit, and equalizing spreads that.
    assert wrong <= 0.03


def test_the_policies_are_the_papers() -> None:
    """They come from torchvision: a change there would change recipes."""
    text = repr([v2.AutoAugment(POLICIES[policy])._policies for policy in sorted(POLICIES)])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "479350db0309d526"
    built = build_auto_augment("imagenet")
    names = [each.name for each in built.operations]
    assert built.policy[0].tolist() == [[names.index("posterize"), 0.4, 8], [names.index("rotate"), 0.6, 9]]


@pytest.mark.parametrize("all_ops", [True, False])
def test_augmix_is_torchvisions_for_its_draws(all_ops: bool) -> None:
    ours, theirs = build_augmix(3, 3, 0, 1.0, all_ops=all_ops), v2.AugMix(all_ops=all_ops)
    space = theirs._AUGMENTATION_SPACE if all_ops else theirs._PARTIAL_AUGMENTATION_SPACE
    assert len(ours.operations) == len(space) + 1
    names = {name.lower(): name for name in space}
    images, generator = make_images(12), np.random.default_rng(6)
    draws = torch.from_numpy(generator.random((12, ours.num_draws)))
    for image, draw in zip(images, draws, strict=True):
        weights = ours._draw_weights(draw[None, :4])[0]
        assert weights.sum().item() == pytest.approx(1)
        mixed = weights[0].float() * image
        for chain, share in zip(draw[4:].chunk(3), weights[1:], strict=True):
            changed = image[None]
            for operation, magnitude, sign in chain[1:].view(3, 3)[: 1 + int(chain[0] * 3)].tolist():
                name = names[ours.operations[1 + int(operation * len(space))].name.replace("_", "")]
                magnitudes, is_signed = space[name]
                table = magnitudes(10, 32, 32)
                amount = 0.0 if table is None else float(table[int(magnitude * 3)])
                amount *= -1 if is_signed and sign < 0.5 else 1
                changed = theirs._apply_image_or_video_transform(
                    changed, name, amount, interpolation=v2.InterpolationMode.BILINEAR, fill={}
                )
            mixed += share.float() * changed[0]
        result = ours(image[None], draw[None])[0]
        # Bilinear movement rounds differently by the last bit, which later operations spread.
        assert (result != mixed.to(torch.uint8)).float().mean() < 0.02


def test_weights_of_augmix_have_the_distribution_of_torchvisions() -> None:
    draws = torch.from_numpy(np.random.default_rng(7).random((20_000, 4)))
    for alpha in (1.0, 0.3):
        weights = build_augmix(3, 3, 0, alpha, all_ops=True)._draw_weights(draws).numpy()
        torch.manual_seed(1)
        original = torch._sample_dirichlet(torch.full((20_000, 2), alpha))[:, 0].numpy()
        chain = torch._sample_dirichlet(torch.full((20_000, 3), alpha)).numpy() * (1 - original[:, None])
        for ours, theirs in ((weights[:, 0], original), (weights[:, 2], chain[:, 1])):
            assert stats.ks_2samp(ours, theirs).pvalue > 1e-3
