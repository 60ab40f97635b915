"""The preprocessing of published weights, as defaults of a recipe's section `data`."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.core.errors import RecipeError
from paceline.core.run_dir import RECIPE, is_run
from paceline.recipe.load import LayerStack, LoadedRecipe, load, validate
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.model import is_published
from paceline.recipe.schema.source import Cifar10, Cifar100, Digits, FashionMnist, Synthetic

if TYPE_CHECKING:  # most recipes have no published weights, whose module imports an HTTP client
    from paceline.models.published import PublishedWeights

_FIELDS: Final = ("mean", "std", "interpolation", "eval_resize", "eval_crop", "auto_image_size")
_PIXEL_SOURCES: Final = (Digits, Synthetic, Cifar10, Cifar100, FashionMnist)
"""Images of one size, which are neither cropped nor enlarged for evaluation unless the recipe says so."""
_GRAY_SOURCES: Final = (Digits, FashionMnist)


def with_weights_defaults(loaded: LoadedRecipe, *, may_download: bool = True) -> LoadedRecipe:
    """Return `loaded` with the preprocessing of its published weights, if any, in fields that no layer sets.

    `model.args` get the arguments of the model that the weights belong to, below those that a layer sets. If the model
    or the weights of a run are replaced, fields of its recipe that followed from these do not count as set. Raise
    `RecipeError` if there are no such weights, and `NotCachedError` if their description would have to be downloaded
    but not `may_download`.
    """
    model = loaded.recipe.model
    if not is_published(model.weights):
        return loaded
    from paceline.models.published import find_published_weights

    inherited = _inherited_fields(loaded, may_download=may_download)
    stack, base = loaded.stack.without(inherited), loaded.base.without(inherited)
    # The recipe of a run names all fields, so that a resumed run needs neither the weights nor their description.
    if all(_is_set(stack, field) for field in _FIELDS) and "args" in stack.values.get("model", {}):
        return loaded
    recipe = validate(stack)
    weights = find_published_weights(model, may_download=may_download)
    is_cropped = _is_set(stack, "eval_crop") or _is_set(stack, "eval_resize")
    values = _preprocessing(recipe.data, weights, may_stretch=not is_cropped)
    stack = _with_values(stack, values, weights)
    given = base.values.get("model", {})
    is_of_base = (given.get("name"), given.get("weights")) == (model.name, model.weights)
    base = _with_values(base, values, weights) if is_of_base else loaded.base
    return replace(loaded, recipe=validate(stack), stack=stack, base=base)


def with_cached_weights_defaults(loaded: LoadedRecipe) -> tuple[LoadedRecipe, str]:
    """Return `with_weights_defaults` without a request to the network, and a note if that leaves fields unknown."""
    if not is_published(loaded.recipe.model.weights):
        return loaded, ""
    from paceline.models.published import NotCachedError

    try:
        return with_weights_defaults(loaded, may_download=False), ""
    except NotCachedError:
        return loaded, (
            f"model.weights: the preprocessing of {loaded.recipe.model.weights} is not known yet, because it is not "
            "downloaded (paceline models has --download)"
        )


def with_run_defaults(loaded: LoadedRecipe, run: Path) -> LoadedRecipe:
    """Return `loaded` with the preprocessing of `run`, if it is a run of its model and weights, in fields not set.

    A run then resumes without its weights, and with another version of their library that describes them otherwise.
    """
    model = loaded.recipe.model
    if not is_published(model.weights) or not is_run(run):
        return loaded
    before = load(str(run))
    if (before.recipe.model.name, before.recipe.model.weights) != (model.name, model.weights):
        return loaded
    plain = before.recipe.to_dict()
    values = {f"data.{field}": plain["data"][field] for field in _FIELDS}
    given = loaded.stack.values.get("model", {}).get("args", {})
    values["model.args"] = {**plain["model"]["args"], **given}
    stack = loaded.stack.with_defaults(values, before.name)
    return replace(loaded, recipe=validate(stack), stack=stack, base=loaded.base.with_defaults(values, before.name))


def _is_set(stack: LayerStack, field: str) -> bool:
    return stack.origin(f"data.{field}") != "default"


def _with_values(stack: LayerStack, values: Mapping[str, Any], weights: "PublishedWeights") -> LayerStack:
    given = stack.values.get("model", {}).get("args", {})
    args = {f"model.args.{name}": value for name, value in weights.args.items() if name not in given}
    return stack.with_defaults({**values, **args}, weights.name)


def _inherited_fields(loaded: LoadedRecipe, *, may_download: bool) -> frozenset[str]:
    """Return the fields that a run's recipe names, but that were not chosen for the model and the weights of now.

    In that run they have their default, or the value of its own published weights.
    """
    stack, model = loaded.stack, loaded.recipe.model
    files = {field: stack.file_of(f"data.{field}") for field in _FIELDS}
    inherited: set[str] = set()
    for file in sorted({each for each in files.values() if Path(each).name == RECIPE and is_run(Path(each).parent)}):
        before = load(file).recipe
        if (before.model.name, before.model.weights) == (model.name, model.weights):
            continue
        values: Mapping[str, Any] = {}
        args: Mapping[str, Any] = {}
        if is_published(before.model.weights):
            from paceline.models.published import find_published_weights

            with suppress(RecipeError):  # they may be gone
                weights = find_published_weights(before.model, may_download=may_download)
                values, args = _preprocessing(before.data, weights, may_stretch=True), weights.args
        plain = before.to_dict()
        own_args = {name for name, value in plain["model"]["args"].items() if name in args and args[name] == value}
        if own_args == set(plain["model"]["args"]):
            inherited.add("model.args")
        inherited |= {f"model.args.{name}" for name in own_args}
        for field in (each for each, source in files.items() if source == file):
            path = f"data.{field}"
            if not before.data.is_set(field) or (path in values and values[path] == plain["data"][field]):
                inherited.add(path)
    return frozenset(inherited)


def _preprocessing(data: Data, weights: "PublishedWeights", *, may_stretch: bool) -> dict[str, Any]:
    """Return fields of `data` by dotted path; without `may_stretch`, images are cropped for any `weights`."""
    config, source = weights.config, data.source
    values: dict[str, Any] = {}
    has_color = getattr(source, "channels", 3) in (3, "auto") and getattr(source, "pixels", "uint8") != "float32"
    if has_color and not isinstance(source, _GRAY_SOURCES) and config.get("mean") and config.get("std"):
        values |= {"data.mean": list(config["mean"]), "data.std": list(config["std"])}
    if config.get("interpolation") in ("bilinear", "bicubic"):
        values["data.interpolation"] = config["interpolation"]
    if not isinstance(source, _PIXEL_SOURCES):
        if config.get("input_size") and data.image_size == "auto":
            values["data.auto_image_size"] = int(config["input_size"][-1])
        if config.get("crop_mode") == "squash" and may_stretch:
            values["data.eval_resize"] = "stretch"
        elif data.eval_resize == "crop" and config.get("crop_pct"):
            values["data.eval_crop"] = min(1.0, float(config["crop_pct"]))  # a few of timm's weights have 1.15
    return values
