"""The preprocessing of published weights, as defaults of a recipe's section `data`."""

from dataclasses import replace
from typing import Any, Final

from paceline.models.published import PublishedWeights, find_published_weights
from paceline.recipe.load import LayerStack, LoadedRecipe, validate
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.model import is_published
from paceline.recipe.schema.source import Cifar10, Cifar100, Digits, FashionMnist, Synthetic

_FIELDS: Final = ("mean", "std", "interpolation", "eval_crop", "image_size")
_PIXEL_SOURCES: Final = (Digits, Synthetic, Cifar10, Cifar100, FashionMnist)
"""Images of one size, which are neither cropped nor enlarged for evaluation unless the recipe says so."""
_GRAY_SOURCES: Final = (Digits, FashionMnist)


def with_weights_defaults(loaded: LoadedRecipe) -> LoadedRecipe:
    """Return `loaded` with the preprocessing of its published weights, if any, in fields that no layer sets.

    Raise `RecipeError` if there are no such weights.
    """
    model = loaded.recipe.model
    # The recipe of a run sets all fields, so that a resumed run needs neither the weights nor their description.
    if not is_published(model.weights) or all(_is_set(loaded.stack, field) for field in _FIELDS):
        return loaded
    weights = find_published_weights(model)
    values = _preprocessing(loaded.recipe.data, weights)
    if weights.args and not _is_set(loaded.stack, "args", "model"):
        values["model.args"] = dict(weights.args)
    stack = loaded.stack.with_defaults(values, weights.name)
    base, given = loaded.base, loaded.base.values.get("model", {})
    if (given.get("name"), given.get("weights")) == (model.name, model.weights):
        base = base.with_defaults(values, weights.name)
    return replace(loaded, recipe=validate(stack), stack=stack, base=base)


def _is_set(stack: LayerStack, field: str, section: str = "data") -> bool:
    return stack.origin(f"{section}.{field}") != "default"


def _preprocessing(data: Data, weights: PublishedWeights) -> dict[str, Any]:
    config, source = weights.config, data.source
    values: dict[str, Any] = {}
    is_gray = isinstance(source, _GRAY_SOURCES) or getattr(source, "channels", 3) == 1
    if not is_gray and config.get("mean") and config.get("std"):
        values |= {"data.mean": list(config["mean"]), "data.std": list(config["std"])}
    if config.get("interpolation") in ("bilinear", "bicubic"):
        values["data.interpolation"] = config["interpolation"]
    if not isinstance(source, _PIXEL_SOURCES):
        if config.get("input_size"):
            values["data.image_size"] = int(config["input_size"][-1])
        if config.get("crop_mode") == "squash":
            values["data.eval_resize"] = "stretch"
        elif data.eval_resize == "crop" and config.get("crop_pct"):
            values["data.eval_crop"] = float(config["crop_pct"])
    return values
