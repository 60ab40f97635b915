"""Try a network before anything is allocated: on torch's meta device, where tensors have shapes and no contents.

A user's own network may do what that device cannot, such as look at a value; then it is tried on the CPU.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from paceline.core.errors import PacelineError, RecipeError
from paceline.models.zoo import build_model
from paceline.recipe.plan import Plan
from paceline.recipe.schema.model import Model
from paceline.recipe.schema.own import is_own_model

_FEW: Final = 2
"""Images that a network is tried with on the CPU."""


def check_model(section: Model, plan: Plan, *, in_half_on_cpu: bool = False) -> None:
    """Raise `RecipeError` in one line when the network cannot take the images of `plan`, or gives no logits for them.

    Every size of training images is tried in training and the size of evaluation in evaluation. Also refuse a layout
    that the network has no use for and, where it is trained in 16 bits on a CPU (`in_half_on_cpu`), convolutions whose
    gradient is wrong there.
    """
    with _watching_strides(active=in_half_on_cpu):
        _check_somewhere(section, plan)


def _check_somewhere(section: Model, plan: Plan) -> None:
    try:
        _check(section, plan, torch.device("meta"))
    except RecipeError:
        if not is_own_model(section.name):
            raise
        few = replace(plan, micro_batch=min(plan.micro_batch, _FEW), eval_batch=min(plan.eval_batch, _FEW))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            _check(section, few, torch.device("cpu"))


def _check(section: Model, plan: Plan, device: torch.device) -> None:
    sizes = sorted({size for _, size in plan.train_sizes})
    with _refusal(section, _shape(plan, plan.micro_batch, sizes[0])):
        model = _build(section, plan, device)
    check_memory_format(section, model)
    for size in sizes:
        _try(section, model.train(), _shape(plan, plan.micro_batch, size), plan.num_classes, device)
    _try(section, model.eval(), _shape(plan, plan.eval_batch, plan.eval_image_size), plan.num_classes, device)


def check_memory_format(section: Model, model: nn.Module) -> None:
    """Raise `RecipeError` when channels_last is asked for by name and `model` has no 2-D convolution to profit."""
    has_conv = any(isinstance(module, nn.Conv2d) for module in model.modules())
    if section.memory_format == "channels_last" and not has_conv:
        raise RecipeError(
            f"model.memory_format: channels_last has no effect on {section.name}, which has no 2-D convolution "
            "(set model.memory_format=contiguous)"
        )


@contextlib.contextmanager
def _watching_strides(*, active: bool) -> Iterator[None]:
    """Refuse, where a network is tried in this context, what oneDNN computes from memory that nobody has written.

    The gradient of a filter of 3x3 or more is that in 16 bits where the map is smaller than the stride, on CPUs with
    AVX-512: seen with torch 2.11 and 2.15, of maps of 1 to 8 pixels and strides of 1 to 4 for all that are such, and
    for no others. Mostly the numbers there look like any others.
    """

    def look(module: nn.Module, inputs: tuple[object, ...]) -> None:
        images = inputs[0] if inputs else None
        if not (module.training and isinstance(module, nn.Conv2d) and isinstance(images, Tensor)):
            return
        sides = [
            (side, stride)
            for side, stride, kernel in zip(images.shape[-2:], module.stride, module.kernel_size, strict=True)
            if side < stride and kernel > 1
        ]
        if sides:
            side, stride = sides[0]
            raise RecipeError(
                f"train.precision: 16 bits on a CPU give a wrong gradient where a stride of {stride} meets a map of "
                f"{side} px (set train.precision=fp32, or a larger data.image_size)"
            )

    if not active:
        yield
        return
    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


def _shape(plan: Plan, batch: int, size: int) -> tuple[int, ...]:
    return batch, plan.channels, size, size


def _try(section: Model, model: nn.Module, shape: tuple[int, ...], num_classes: int, device: torch.device) -> None:
    with _refusal(section, shape), device:
        logits = model(torch.zeros(shape))
    wanted = (shape[0], num_classes)
    if isinstance(logits, Tensor) and tuple(logits.shape) == wanted and logits.is_floating_point():
        return
    given = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    raise RecipeError(
        f"model.name: {section.name} gives {given} for images {list(shape)}, not logits {list(wanted)} (have it return "
        f"one number a class)"
    )


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


def _build(section: Model, plan: Plan, device: torch.device) -> nn.Module:
    try:
        with device:
            return build_model(section, num_classes=plan.num_classes, channels=plan.channels)
    except NotImplementedError:
        # torchvision's regnets compute their widths with tensors, and read them.
        with torch.random.fork_rng(devices=[]):
            return build_model(section, num_classes=plan.num_classes, channels=plan.channels).to(device)
