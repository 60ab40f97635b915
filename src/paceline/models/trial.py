"""Try a network before anything is allocated: on torch's meta device, where tensors have shapes and no contents.

A user's own network may do what that device cannot, such as look at a value; then it is tried on the CPU.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.core.errors import PacelineError, RecipeError
from paceline.models.freezing import set_training, what_is_trained
from paceline.models.modes import modes, thawed
from paceline.models.zoo import build_model
from paceline.recipe.plan import Plan
from paceline.recipe.schema.model import Model
from paceline.recipe.schema.own import is_own_model

_FEW: Final = 2
"""Images that a network is tried with on the CPU."""


def check_model(section: Model, plan: Plan, *, half_on_cpu: str = "") -> tuple[str, ...]:
    """Return what a user should know of the network, in sentences, where it can be trained.

    Raise `RecipeError` in one line when the network cannot take the images of `plan`, or gives no logits for them.

    Every size of training images is tried in training and the size of evaluation in evaluation. Also refuse a layout
    that the network has no use for and, where it is to be trained on a CPU in the 16 bits that are called
    `half_on_cpu`, filters whose gradient is wrong there.
    """
    try:
        return _check(section, plan, torch.device("meta"), half_on_cpu)
    except RecipeError:
        if not is_own_model(section.name):
            raise
        few = replace(plan, micro_batch=min(plan.micro_batch, _FEW), eval_batch=min(plan.eval_batch, _FEW))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return _check(section, few, torch.device("cpu"), half_on_cpu)


def _check(section: Model, plan: Plan, device: torch.device, half_on_cpu: str) -> tuple[str, ...]:
    sizes = sorted({size for _, size in plan.train_sizes})
    with _refusal(section, _shape(plan, plan.micro_batch, sizes[0])):
        model = build_on(section, plan, device)
        as_made = modes(model)
        set_training(section, model, plan.num_classes)
    notes = (_undone(section, thawed(as_made, model)), what_is_trained(section, model))
    check_memory_format(section, model)
    with _Strides(half_on_cpu) if half_on_cpu else contextlib.nullcontext():
        for size in sizes:
            _try(section, model, _shape(plan, plan.micro_batch, size), plan.num_classes, device)
    _try(section, model.eval(), _shape(plan, plan.eval_batch, plan.eval_image_size), plan.num_classes, device)
    return tuple(filter(None, notes))


def _undone(section: Model, names: Sequence[str]) -> str | None:
    """Say of which modules the network itself ended training mode while it was made, without effect on training."""
    if not names:
        return None
    which = f"{names[0] or 'itself'} and {len(names) - 1} more modules" if names[1:] else names[0] or "itself"
    return (
        f"model.name: {section.name} puts {which} into evaluation mode as it is made, and training puts all back "
        "(do so in train(), or set model.freeze)"
    )


class _Strides(TorchFunctionMode):
    """Refuse convolutions whose filters' gradient oneDNN makes of memory that nobody has written.

    In 16 bits, on CPUs with AVX-512, that is so for filters of more than one pixel where the map is smaller than the
    stride: seen with torch 2.11 and 2.15, of maps of 1 to 8 pixels and strides of 1 to 4 for all that are such and for
    no others. Mostly such numbers look like any others. All CPUs refuse it, so that a recipe is the same on each.
    """

    def __init__(self, precision: str) -> None:
        super().__init__()
        self._precision = precision

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func is torch.conv2d:
            named: dict[str, Any] = {**dict(zip(("input", "weight", "bias", "stride"), args, strict=False)), **given}
            self._look(named["input"], named["weight"], named.get("stride", 1))
        return func(*args, **given)

    def _look(self, images: Tensor, weight: Tensor, stride: int | Sequence[int]) -> None:
        strides = (stride, stride) if isinstance(stride, int) else stride
        sides = zip(images.shape[-2:], weight.shape[-2:], strides, strict=False)
        small = [(side, step) for side, kernel, step in sides if kernel > 1 and side < step]
        if small and weight.requires_grad:
            side, step = small[0]
            raise RecipeError(
                f"train.precision: {self._precision} on a CPU gives a wrong gradient where a stride of {step} meets "
                f"a map of {side} px (set train.precision=fp32, or a larger data.image_size)"
            )


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


def build_on(section: Model, plan: Plan, device: torch.device) -> nn.Module:
    """Build the network for the images and classes of `plan`; on the meta device it holds shapes and no weights."""
    try:
        with device, warnings.catch_warnings():
            # A network that reads its own weights, one warning a tensor: here there is nothing to copy them to.
            warnings.filterwarnings("ignore", r"for .*: copying from a non-meta parameter in the checkpoint")
            return build_model(section, num_classes=plan.num_classes, channels=plan.channels)
    except NotImplementedError:
        # torchvision's regnets compute their widths with tensors, and read them.
        with torch.random.fork_rng(devices=[]):
            return build_model(section, num_classes=plan.num_classes, channels=plan.channels).to(device)
