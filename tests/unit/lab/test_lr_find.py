"""The rule of `lr-find` on curves whose answer is known."""

import math

import numpy as np
import pytest

from paceline.lab.lr_find import list_rates, round_rate, smooth, suggest_lr

RATES = list_rates(1e-7, 10.0, 100)


def valley(best: float, *, noise: float = 0.0, seed: int = 0, rise: float = 4.0) -> list[float]:
    """Return losses that fall by 1 to a minimum at `best`, symmetrically within a decade of it, and then diverge."""
    draws = np.random.default_rng(seed).normal(0.0, 1.0, len(RATES))
    losses = []
    for rate, draw in zip(RATES, draws, strict=True):
        distance = math.log10(rate / best)
        loss = 2.3 - math.exp(-0.5 * (distance / 0.7) ** 2) + (rise * (distance - 1) if distance > 1 else 0.0)
        losses.append(loss + noise * float(draw))
    return losses


@pytest.mark.parametrize(("best", "suggested"), [(1e-4, 2e-4), (3e-3, 5e-3), (0.1, 0.2)])
def test_the_suggestion_is_where_the_loss_has_risen_by_a_tenth_of_its_fall(best: float, suggested: float) -> None:
    """That is 0.32 decades above the minimum, rounded to a series of six rates per decade."""
    suggestion = suggest_lr(RATES, [valley(best)])
    assert suggestion.lr == suggested
    assert not suggestion.caution
    assert len(suggestion.smoothed) == len(RATES)


@pytest.mark.parametrize(("best", "suggested"), [(1e-4, 3e-5), (3e-3, 1e-3), (0.1, 0.03)])
def test_the_rate_for_pretrained_weights_that_suit_the_task_is_a_third_of_the_minimum(
    best: float, suggested: float
) -> None:
    suggestion = suggest_lr(RATES, [valley(best)] * 2, is_pretrained=True)
    assert suggestion.lr == suggested
    assert not suggestion.caution


def test_pretrained_weights_have_a_suggestion_if_the_loss_still_falls_at_the_highest_rate() -> None:
    rates = RATES[:70]  # up to 0.038
    suggestion = suggest_lr(rates, [valley(0.1)[:70]], is_pretrained=True)
    assert suggestion.lr is not None and "(try --to 4e+00)" in suggestion.caution


def test_pretrained_weights_whose_loss_stays_low_need_no_higher_rates() -> None:
    losses = [2.3 - 1.5 / (1 + math.exp(-6 * math.log10(rate / 1e-3))) + (rate > 0.01) * 0.05 for rate in RATES]
    suggestion = suggest_lr(RATES, [losses], is_pretrained=True)
    assert not suggestion.caution and suggestion.lr is not None and suggestion.lr < 0.1
    assert suggest_lr(RATES, [losses]).caution


def test_pretrained_weights_whose_loss_hardly_falls_are_treated_as_fresh_ones() -> None:
    losses = [2.3 + 0.2 * (loss - 2.3) for loss in valley(0.01)]
    assert suggest_lr(RATES, [losses], is_pretrained=True) == suggest_lr(RATES, [losses])


def test_noise_moves_the_suggestion_little_and_less_with_more_runs() -> None:
    one = [suggest_lr(RATES, [valley(0.01, noise=0.3, seed=seed)]).lr for seed in range(12)]
    three = [
        suggest_lr(RATES, [valley(0.01, noise=0.3, seed=3 * seed + each) for each in range(3)]).lr for seed in range(12)
    ]
    errors = [np.mean([abs(math.log10((lr or 1.0) / 0.02)) for lr in many]) for many in (one, three)]
    assert errors[1] < errors[0] < 0.3


def test_the_last_bits_of_losses_do_not_show() -> None:
    losses = valley(0.01, noise=0.05)
    rounded = [loss * (1 + 1e-6 * (-1) ** step) for step, loss in enumerate(losses)]
    assert suggest_lr(RATES, [losses]).lr == suggest_lr(RATES, [rounded]).lr


def test_losses_of_a_diverging_run_do_not_move_the_minimum() -> None:
    mild, steep = (suggest_lr(RATES, [valley(0.01, rise=rise)]).lr for rise in (4.0, 1e6))
    assert mild == steep


def test_a_run_that_diverges_early_does_not_move_the_suggestion() -> None:
    """Its later steps count as losses that are cut, and the other runs keep theirs: by two rates of the series."""
    whole = valley(0.01)
    assert suggest_lr(RATES, [whole]).lr == 0.02
    for step in (30, 45, 60, 70, 80):  # from 3e-5 to 0.3
        suggestion = suggest_lr(RATES, [whole[:step], whole, whole])
        assert len(suggestion.smoothed) == 100 and suggestion.lr in (0.01, 0.015, 0.02)


def test_a_few_noisy_steps_do_not_move_the_suggestion() -> None:
    """As with BatchNorm of few images per rank: spikes of one run near the minimum, and lucky steps far above it."""
    quiet = valley(0.01)
    noisy = [2 * loss if step in (58, 61, 63) else loss for step, loss in enumerate(quiet)]
    lucky = [1.6 if step in (80, 84) else loss for step, loss in enumerate(quiet)]
    assert suggest_lr(RATES, [quiet]).lr == 0.02
    assert suggest_lr(RATES, [noisy, lucky, quiet]).lr in (0.015, 0.02, 0.03)


def test_runs_that_disagree_are_a_caution() -> None:
    assert not suggest_lr(RATES, [valley(0.01), valley(0.012), valley(0.015)]).caution
    apart = suggest_lr(RATES, [valley(0.001), valley(0.01), valley(0.1)])
    assert apart.lr is not None and apart.caution.startswith("single runs suggest 0.002 to 0.2 (try more --steps")


def test_few_steps_are_a_caution() -> None:
    few = suggest_lr(RATES[::2], [valley(0.01)[::2]])
    assert few.lr is not None and "(try --steps 81," in few.caution


def test_losses_below_0_have_a_suggestion() -> None:
    """As a user's own loss may be, such as a log-likelihood."""
    lower = suggest_lr(RATES, [[loss - 5 for loss in valley(0.01)]])
    assert lower.lr == suggest_lr(RATES, [valley(0.01)]).lr


def test_suggestions_are_of_a_series() -> None:
    rates = (0.0118, 0.0128, 0.98, 9.9, 8.3, 8.5, 3e-7)
    assert [round_rate(rate) for rate in rates] == [0.01, 0.015, 1.0, 10.0, 7.0, 10.0, 3e-7]


def test_a_flat_curve_names_no_rate_and_the_new_range() -> None:
    flat = suggest_lr(RATES, [[2.3 + 0.002 * (step % 2) for step in range(100)]])
    assert flat.lr is None and "--to 1e+04" in flat.caution


def test_a_curve_that_diverges_at_once_names_a_lower_range() -> None:
    diverged = suggest_lr(RATES, [[2.3 * 1.3**step for step in range(12)]])
    assert diverged.lr is None and "--from 1e-10 --to 1e-02" in diverged.caution


def test_a_minimum_at_the_edge_is_a_caution() -> None:
    falling = suggest_lr(RATES, [valley(30.0)])
    assert falling.lr is not None and "--to 1e+03" in falling.caution


def test_the_smoother_keeps_a_line() -> None:
    x = np.linspace(-7, 1, 50)
    np.testing.assert_allclose(smooth(x, 3 - 0.2 * x), 3 - 0.2 * x, rtol=1e-9)
