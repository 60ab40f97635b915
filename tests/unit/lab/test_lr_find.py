"""The rule of `lr-find` on curves whose answer is known."""

import math

import numpy as np
import pytest

from paceline.lab.lr_find import list_rates, smooth, suggest_lr

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


@pytest.mark.parametrize("best", [1e-4, 3e-3, 0.1])
def test_the_suggestion_is_where_the_loss_has_risen_by_a_tenth_of_its_fall(best: float) -> None:
    """That is 0.32 decades above the minimum, and the rates of steps are 0.08 decades apart."""
    suggestion = suggest_lr(RATES, [valley(best)])
    assert suggestion.lr is not None and 0.24 < math.log10(suggestion.lr / best) < 0.33
    assert not suggestion.caution
    assert len(suggestion.smoothed) == len(RATES)


def test_noise_moves_the_suggestion_little_and_less_with_more_runs() -> None:
    one = [suggest_lr(RATES, [valley(0.01, noise=0.1, seed=seed)]).lr for seed in range(12)]
    three = [
        suggest_lr(RATES, [valley(0.01, noise=0.1, seed=3 * seed + each) for each in range(3)]).lr for seed in range(12)
    ]
    errors = [np.mean([abs(math.log10((lr or 1.0) / 0.02)) for lr in many]) for many in (one, three)]
    assert errors[1] < errors[0] < 0.2


def test_the_last_bits_of_losses_do_not_show() -> None:
    losses = valley(0.01, noise=0.05)
    rounded = [loss * (1 + 1e-6 * (-1) ** step) for step, loss in enumerate(losses)]
    assert suggest_lr(RATES, [losses]).lr == suggest_lr(RATES, [rounded]).lr


def test_losses_of_a_diverging_run_do_not_move_the_minimum() -> None:
    mild, steep = (suggest_lr(RATES, [valley(0.01, rise=rise)]).lr for rise in (4.0, 1e6))
    assert mild == steep


def test_runs_of_different_lengths_are_pooled_over_the_steps_of_all() -> None:
    suggestion = suggest_lr(RATES, [valley(0.01)[:80], valley(0.01)])
    assert len(suggestion.smoothed) == 80 and suggestion.lr == suggest_lr(RATES, [valley(0.01)]).lr


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
