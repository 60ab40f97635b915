"""The kernels of an update follow the recipe: bytes and launches of each of its settings."""

import math
from dataclasses import replace

import pytest

from paceline.lab.quote.update import list_optimizer_kernels, list_update_kernels
from paceline.models.flops import Kernel, StepKernels
from paceline.recipe.schema import Recipe

STEP = StepKernels(10**6, 100, (), ())


def update(train: dict | None = None, **sections: dict) -> list[Kernel]:
    values = {"data": {"source": {"name": "synthetic"}}, "train": {"epochs": 1, **(train or {})}, **sections}
    recipe = Recipe.model_validate(values)
    return list_update_kernels(STEP, recipe)


def megabytes(kernels: list[Kernel]) -> float:
    return math.fsum(each.batch_bytes for each in kernels) / 1e6


def test_a_fused_optimizer_moves_and_launches_less() -> None:
    fused, foreach, loop = (list_optimizer_kernels(STEP, "sgd", name) for name in ("fused", "foreach", "loop"))

    # Gradient, weight and momentum are read, weight and momentum written.
    assert megabytes(fused) == pytest.approx(4 * 5)
    assert megabytes(fused) < megabytes(foreach) == pytest.approx(megabytes(loop))
    assert len(fused) < len(foreach) < len(loop) == 5 * 100
    assert megabytes(fused) < megabytes(list_optimizer_kernels(STEP, "adamw", "fused"))


@pytest.mark.parametrize(
    ("train", "passes"),
    [({"clip_norm": 1.0}, 2), ({"clip_agc": 0.01}, 11), ({"ema": {"every": 1}}, 3), ({"ema": {"every": 5}}, 0.6)],
)
def test_settings_of_a_recipe_add_their_passes(train: dict, passes: float) -> None:
    assert megabytes(update(train=train)) - megabytes(update()) == pytest.approx(4 * passes)


def test_an_average_of_every_nth_step_has_as_many_launches_fewer() -> None:
    every, fifth = (len(update(train={"ema": {"every": number}})) - len(update()) for number in (1, 5))

    assert (every, fifth) == (5, 1)  # of 100 tensors, 20 per launch


def test_frozen_parameters_are_not_updated() -> None:
    frozen = replace(STEP, frozen_params=STEP.params * 3 // 4, frozen_tensors=60)
    whole, part = (list_optimizer_kernels(each, "sgd", "loop") for each in (STEP, frozen))

    assert megabytes(part) == pytest.approx(megabytes(whole) / 4)
    assert len(part) == len(whole) * 40 // 100


def test_the_implementation_of_the_recipe_counts() -> None:
    auto, fused, loop = (update(optim={"name": "sgd", "implementation": name}) for name in ("auto", "fused", "loop"))

    assert auto == fused
    assert len(loop) > len(fused)
    assert len(update(optim={"name": "lamb"})) > len(update())
