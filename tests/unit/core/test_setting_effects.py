"""Settings that change what is learned, and not how fast."""

import types
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from paceline.core.setting_effects import changes_result, changes_result_only
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe
from paceline.training.resume import list_forbidden_changes


@pytest.mark.parametrize(
    "path",
    ["seed", "optim.lr", "optim.weight_decay", "optim.betas", "schedule.warmup", "schedule.name",
     "train.label_smoothing", "train.class_weights.cat", "train.stop.top1", "model.weights"],
)  # fmt: skip
def test_fields_that_change_only_the_result(path: str) -> None:
    assert changes_result_only(path)


@pytest.mark.parametrize(
    "path",
    ["optim.name", "optim.implementation", "optim.args.depth", "data.batch_size", "data.workers", "data.augment",
     "data.source.val_fraction", "train.precision", "train.ema.every", "model.width", "log.every", "seeds",
     "optimizer"],
)  # fmt: skip
def test_fields_that_change_the_speed_or_nothing(path: str) -> None:
    assert not changes_result_only(path) and not changes_result(path)


@pytest.mark.parametrize(
    "path",
    ["optim.momentum", "optim.nesterov", "optim.rescale", "optim.decay_norm_and_bias", "optim.norm_and_bias_lr",
     "optim.layer_decay"],
)  # fmt: skip
def test_fields_that_change_the_result_and_the_speed(path: str) -> None:
    assert changes_result(path) and not changes_result_only(path)


def test_every_name_in_the_list_is_a_field_of_the_schema() -> None:
    from paceline.core import setting_effects

    fields = set(_fields(Recipe, ""))
    assert {
        *setting_effects._CHANGES_RESULT,
        *setting_effects._CHANGES_RESULT_AND_SPEED,
        *setting_effects._CHANGES_RESULT_AND_STEP,
    } <= fields


@pytest.mark.parametrize(
    "word",
    ["seed=1", "optim.lr=0.5", "optim.nesterov=false", "schedule.final=0.1", "train.label_smoothing=0.2",
     "train.stop.top1=0.9", "model.zero_init_residual=true", "data.mean=[0.5]"],
)  # fmt: skip
def test_a_field_that_changes_the_result_cannot_change_on_a_resume(word: str) -> None:
    path = word.partition("=")[0]
    assert changes_result(path)
    assert list_forbidden_changes(load("digits").recipe.to_dict(), load("digits", Patch.parse([word])).recipe.to_dict())


def _fields(section: Any, prefix: str) -> Iterator[str]:
    """Yield the dotted paths of a section, of all of its variants."""
    for each in _sections(section):
        for name, field in each.model_fields.items():
            yield f"{prefix}{name}"
            yield from _fields(field.annotation, f"{prefix}{name}.")


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, BaseModel):
            yield annotation
    else:
        for each in get_args(annotation):
            yield from _sections(each)
