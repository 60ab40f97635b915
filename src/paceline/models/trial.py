"""Try a network before anything is allocated: on torch's meta device, where tensors have shapes and no contents."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from paceline.core.errors import PacelineError, RecipeError
from paceline.models.zoo import build_model
from paceline.recipe.plan import Plan
from paceline.recipe.schema.model import Model


def check_model(section: Model, plan: Plan) -> None:
    """Raise `RecipeError` in one line when the network cannot take the images of `plan`.

    Every size of training images is tried in training and the size of evaluation in evaluation. Also refuse a layout
    that the network has no use for.
    """
    sizes = sorted({size for _, size in plan.train_sizes})
    with _refusal(section, _shape(plan, plan.micro_batch, sizes[0])):
        model = _build_on_meta(section, plan)
    check_memory_format(section, model)
    for size in sizes:
        _try(section, model.train(), _shape(plan, plan.micro_batch, size))
    _try(section, model.eval(), _shape(plan, plan.eval_batch, plan.eval_image_size))


def check_memory_format(section: Model, model: nn.Module) -> None:
    """Raise `RecipeError` when channels_last is asked for by name and `model` has no 2-D convolution to profit."""
    has_conv = any(isinstance(module, nn.Conv2d) for module in model.modules())
    if section.memory_format == "channels_last" and not has_conv:
        raise RecipeError(
            f"model.memory_format: channels_last has no effect on {section.name}, which has no 2-D convolution "
            "(set model.memory_format=contiguous)"
        )


def _shape(plan: Plan, batch: int, size: int) -> tuple[int, ...]:
    return batch, plan.channels, size, size


def _try(section: Model, model: nn.Module, shape: tuple[int, ...]) -> None:
    with _refusal(section, shape), torch.device("meta"):
        model(torch.empty(shape))


@contextlib.contextmanager
def _refusal(section: Model, shape: tuple[int, ...]) -> Iterator[None]:
    """Turn whatever a network raises at a batch of `shape` into one line."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        taken = "x".join(str(size) for size in shape)
        raise RecipeError(f"model.name: {section.name} cannot take a batch of {taken}: {reason}") from None


def _build_on_meta(section: Model, plan: Plan) -> nn.Module:
    try:
        with torch.device("meta"):
            return build_model(section, num_classes=plan.num_classes, channels=plan.channels)
    except NotImplementedError:
        # torchvision's regnets compute their widths with tensors, and read them.
        with torch.random.fork_rng(devices=[]):
            return build_model(section, num_classes=plan.num_classes, channels=plan.channels).to("meta")
