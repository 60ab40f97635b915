"""Mixing: pairs of the global batch, weights from Beta, and labels with the weights of the pixels."""

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.data.augment.mixup import (
    MixMethod,
    PairMixer,
    build_mixer,
    compute_cutmix_weights,
    compute_mixup_weights,
)
from paceline.recipe.schema.data import Data

NUM_CLASSES = 5


def mixing(*augment: object) -> PairMixer:
    built = build_mixer(Data(augment=augment).augment, NUM_CLASSES)  # type: ignore[arg-type]
    assert isinstance(built, PairMixer)
    return built


BOTH = (MixMethod(0.2, compute_mixup_weights), MixMethod(1.0, compute_cutmix_weights))


def prepared(mix: PairMixer, num: int = 40) -> torch.Tensor:
    return torch.from_numpy(mix.prepare(np.random.default_rng(1).random((num, mix.num_draws)), 0))


def flat(num: int = 40, height: int = 12, width: int = 20, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return images whose pixels all have the number of the image as their value."""
    return torch.arange(num, dtype=dtype)[:, None, None, None].expand(-1, 3, height, width).contiguous()


def classes(num: int = 40) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(4).integers(0, NUM_CLASSES, num))


def test_mixup_blends_each_image_and_label_with_its_neighbours() -> None:
    mix = mixing("mixup")
    draws, labels = prepared(mix), classes()
    images, targets = mix(flat(), labels, draws)
    for index, (image, target) in enumerate(zip(images, targets, strict=True)):
        share, neighbour = draws[index - index % 2, 1].item(), index + 1 - 2 * (index % 2)
        wanted = torch.zeros(NUM_CLASSES, dtype=torch.float64)
        wanted[labels[index]] += share
        wanted[labels[neighbour]] += 1 - share
        # float32 against float64
        torch.testing.assert_close(target.double(), wanted, atol=1e-6, rtol=0)
        torch.testing.assert_close(
            image.double(), torch.full_like(image, share * index + (1 - share) * neighbour).double(), atol=1e-5, rtol=0
        )


def test_cutmix_pastes_its_papers_box_and_nothing_else() -> None:
    mix = mixing("cutmix")
    draws = prepared(mix)
    images, _ = mix(flat(), classes(), draws)
    for index, image in enumerate(images):
        _, share, row, column = draws[index - index % 2].tolist()
        half_height, half_width = int(12 * (1 - share) ** 0.5) // 2, int(20 * (1 - share) ** 0.5) // 2
        y, x = int(row * 12), int(column * 20)
        expected = flat()[index]
        top, left = max(0, y - half_height), max(0, x - half_width)
        expected[:, top : y + half_height, left : x + half_width] = index + 1 - 2 * (index % 2)
        assert torch.equal(image, expected)


@pytest.mark.parametrize("augment", [("mixup",), ("cutmix",), ("mixup", "cutmix")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_targets_sum_to_one_and_keep_what_the_pixels_keep(augment: tuple[str, ...], dtype: torch.dtype) -> None:
    """Image 2k is 0 everywhere and image 2k + 1 is 1, so the mean of the pixels is the weight of the neighbor."""
    mix = mixing(*augment)
    images, targets = mix(flat(dtype=dtype) % 2, torch.arange(40) % 2, prepared(mix))
    assert images.dtype == targets.dtype == dtype and targets.shape == (40, NUM_CLASSES)
    # Sums and means of a few hundred numbers of this format.
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(targets.sum(1), torch.ones(40, dtype=dtype), atol=tolerance, rtol=0)
    torch.testing.assert_close(images.mean((1, 2, 3)), targets[:, 1], atol=tolerance, rtol=0)
    assert 0.2 < targets[:, 1].double().mean() < 0.8


@pytest.mark.parametrize("parts", [2, 4, 10, 20])
def test_micro_batches_mix_as_the_whole_batch_does(parts: int) -> None:
    mix = PairMixer(BOTH, NUM_CLASSES)
    raw = np.random.default_rng(1).random((40, 4))
    images, labels = torch.rand((40, 3, 8, 8), generator=torch.Generator().manual_seed(0)), classes()
    whole = mix(images, labels, torch.from_numpy(mix.prepare(raw, 0)))
    pieces = zip(images.chunk(parts), labels.chunk(parts), np.split(raw, parts), strict=True)
    mixed = [mix(image, label, torch.from_numpy(mix.prepare(draw, 0))) for image, label, draw in pieces]
    for position in (0, 1):
        assert torch.equal(torch.cat([piece[position] for piece in mixed]), whole[position])


def test_a_pair_takes_its_draws_from_its_first_image() -> None:
    mix = PairMixer(BOTH, NUM_CLASSES)
    draws = np.random.default_rng(1).random((40, 4))
    other = draws.copy()
    other[1::2] = 0.123
    results = [mix(flat(), classes(), torch.from_numpy(mix.prepare(raw, 0))) for raw in (draws, other)]
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_with_both_methods_each_pair_gets_one_of_them() -> None:
    """A blended image has values between two images everywhere, a pasted one nowhere."""
    mix = mixing("mixup", "cutmix")
    draws = prepared(mix, 400)
    images, _ = mix(flat(400), classes(400), draws)
    is_blended = draws[0::2, 0] < 0.5
    alone = [kind(flat(400), classes(400), draws)[0] for kind in (mixing("mixup"), mixing("cutmix"))]
    for pair, blended in enumerate(is_blended.tolist()):
        both = slice(2 * pair, 2 * pair + 2)
        assert torch.equal(images[both], alone[0 if blended else 1][both])
    assert 0.3 < is_blended.double().mean() < 0.7


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_shares_follow_the_beta_distribution(alpha: float) -> None:
    """Kolmogorov and Smirnov's test of 5,000 shares; the seed is fixed, so no flake."""
    mix = mixing({"name": "mixup", "alpha": alpha})
    shares = prepared(mix, 10_000)[0::2, 1].numpy()
    assert stats.kstest(shares, stats.beta(alpha, alpha).cdf).pvalue > 1e-3


def test_each_kind_has_its_own_alpha() -> None:
    draws = np.full((4, 4), 0.2)
    draws[2:, 0] = 0.7
    shares = mixing("mixup", "cutmix").prepare(draws, 0)[:, 1]
    assert shares[0] == pytest.approx(stats.beta(0.2, 0.2).ppf(0.2)) and shares[2] == pytest.approx(0.2)


def test_without_mixing_there_is_no_mixer() -> None:
    assert build_mixer(Data(augment=("flip",)).augment, NUM_CLASSES) is None  # type: ignore[arg-type]


def test_the_loss_takes_the_targets() -> None:
    mix = PairMixer(BOTH, NUM_CLASSES)
    _, targets = mix(flat(), classes(), prepared(mix))
    logits = torch.randn((40, NUM_CLASSES), generator=torch.Generator().manual_seed(0))
    expected = -(targets * logits.log_softmax(1)).sum(1).mean()
    # Two orders of adding up 200 numbers in float32.
    torch.testing.assert_close(torch.nn.CrossEntropyLoss()(logits, targets), expected, atol=1e-5, rtol=0)


def test_a_pair_is_mixed_with_its_probability_until_mixing_ends() -> None:
    sections = Data(augment=({"name": "mixup", "p": 0.25, "until": "3ep"}, {"name": "cutmix", "until": "50st"})).augment
    mix = build_mixer(sections, NUM_CLASSES, lambda until: int(until.value) * (10 if until.unit == "ep" else 1))
    assert mix is not None
    draws, labels = np.random.default_rng(2).random((4000, 4)), classes(4000)
    is_mixup = draws[0::2, 0] < 0.5
    for step, (blended, pasted) in {0: (0.25, 1), 29: (0.25, 1), 30: (0, 1), 49: (0, 1), 50: (0, 0)}.items():
        is_mixed = mix.prepare(draws, step)[0::2, 1] < 1
        assert is_mixed[is_mixup].mean() == pytest.approx(blended, abs=0.05)
        assert is_mixed[~is_mixup].mean() == pasted
    images, targets = mix(flat(4000, 4, 4), labels, torch.from_numpy(mix.prepare(draws, 50)))
    assert torch.equal(images, flat(4000, 4, 4))
    assert torch.equal(targets, torch.nn.functional.one_hot(labels, NUM_CLASSES).float())
