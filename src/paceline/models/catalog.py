"""All models by name: those of paceline, torchvision and timm, with their cost and published weights."""

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.models.build import MODEL_NAMES, build_model
from paceline.models.published import find_published_weights, list_tags
from paceline.recipe.schema.model import Model

_IMAGENET_CLASSES: Final = 1000
_CIFAR_CLASSES: Final = 10
_CIFAR_SIZE: Final = 32
_DEFAULT_SIZE: Final = 224


@dataclass(frozen=True)
class ModelFacts:
    """A model at its own `image_size` in pixels, and the tags of its published `weights`, the default first.

    `params` counts numbers and `flops` the operations of a forward pass per image, 2 per multiply-add; both are None
    for a model that was not built.
    """

    name: str
    image_size: int
    weights: tuple[str, ...]
    params: int | None = None
    flops: int | None = None


def list_model_names(pattern: str = "*") -> list[str]:
    """Return the names for `model.name` that match: all of the name, its part after the library, or a substring."""
    import timm
    from torchvision import models

    names = [
        *MODEL_NAMES,
        *(f"torchvision:{name}" for name in models.list_models(module=models)),
        *(f"timm:{name}" for name in timm.list_models()),
    ]
    wanted = pattern.casefold()
    exact = [name for name in names if wanted in (name.casefold(), name.partition(":")[2].casefold())]
    if exact:
        return exact
    if not set(pattern) & set("*?["):
        wanted = f"*{wanted}*"
    return [name for name in names if _matches(name.casefold(), wanted)]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition(":")[2] or name, pattern)


def describe_models(names: Sequence[str], max_built: int) -> list[ModelFacts]:
    """Return the facts of each model; the cost only if there are at most `max_built`, as each takes up to a second."""
    return [_describe(name, is_built=len(names) <= max_built) for name in names]


def _describe(name: str, *, is_built: bool) -> ModelFacts:
    size, tags = own_image_size(name), tuple(list_tags(name))
    if not is_built:
        return ModelFacts(name, size, tags)
    classes = _IMAGENET_CLASSES if ":" in name else _CIFAR_CLASSES
    # Some models cannot be built on the meta device, and a few of timm need packages of their own.
    with contextlib.suppress(Exception), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        with torch.device("meta"), torch.no_grad():
            model = build_model(Model(name=name), num_classes=classes, channels=3).eval()
            params = sum(parameter.numel() for parameter in model.parameters())
            with FlopCounterMode(display=False) as counter:
                model(torch.empty(1, 3, size, size))
        return ModelFacts(name, size, tags, params, counter.get_total_flops())
    return ModelFacts(name, size, tags)


def own_image_size(name: str) -> int:
    """Return the height and width in pixels of the images for which the model `name` was made."""
    library, _, model = name.partition(":")
    if library == "timm":
        import timm

        config = timm.get_pretrained_cfg(model)
        return int(config.input_size[-1]) if config is not None else _DEFAULT_SIZE
    if library == "torchvision":
        if not list_tags(name):
            return _DEFAULT_SIZE
        return int(find_published_weights(Model(name=name, weights="default")).config["input_size"][-1])
    return _CIFAR_SIZE
