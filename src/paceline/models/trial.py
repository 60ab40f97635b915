"""Try a network before anything is allocated: on torch's meta device, where tensors have shapes and no contents.

A user's own network may do what that device cannot, such as look at a value; then it is tried on the CPU.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
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


_FEW_INPUTS: Final = 16
"""Channels that the AVX-512 kernel of the gradient takes at once; the one for AVX2 takes 8."""


def choose_memory_format(
    section: Model, device: torch.device, *, num_classes: int, channels: int
) -> torch.memory_format:
    """Return the layout of images and filters of the network that `section` names: `auto` is resolved for `device`.

    `auto` is channels_last, but contiguous on a CPU for a network that `overflowing_gradients` names a layer of. The
    network is built to see its layers. One that cannot be built is channels_last: `check_model` refuses it.
    """
    if section.memory_format != "auto":
        return torch.contiguous_format if section.memory_format == "contiguous" else torch.channels_last
    if device.type != "cpu":
        return torch.channels_last
    for where in (torch.device("meta"), device):
        # A user's own network may do what the meta device cannot.
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with where:
                model = build_model(section, num_classes=num_classes, channels=channels)
            return torch.contiguous_format if overflowing_gradients(model) else torch.channels_last
    return torch.channels_last


def overflowing_gradients(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the convolutions whose filters' gradient, in channels_last on a CPU, corrupts the heap.

    These are 1x1 convolutions in one group, without padding, with a stride and fewer than 16 input channels. For their
    gradient oneDNN copies the images to a buffer of `inputs` numbers per pixel and steps through it by 16 (AVX-512) or
    8 (AVX2): https://github.com/uxlfoundation/oneDNN/issues/6035. Seen with torch 2.15. Whether a size
    of images leads to a crash depends on what lies behind the buffer, so no size is taken to be safe. The forward pass,
    the gradient of the images, 16-bit types and contiguous tensors are sound. benchmarks/channels_last.py shows all
    of this with torch alone.
    """
    return tuple(name for name, module in model.named_modules() if _overflows(module))


def _overflows(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d) or module.groups > 1 or module.in_channels >= _FEW_INPUTS:
        return False
    is_padded = not isinstance(module.padding, str) and any(module.padding)
    return set(module.kernel_size) == {1} and set(module.stride) != {1} and not is_padded


def check_model(
    section: Model, plan: Plan, *, half_on_cpu: str = "", fp32_on_cpu: bool = False, compile_mode: str = "off"
) -> tuple[str, ...]:
    """Return what a user should know of the network, in sentences, where it can be trained.

    Raise `RecipeError` in one line when the network cannot take the images of `plan`, or gives no logits for them.

    Every size of training images is tried in training and the size of evaluation in evaluation. Also refuse a layout
    that the network has no use for and, where it is to be trained on a CPU in the 16 bits that are called
    `half_on_cpu`, filters whose gradient is wrong there. With `fp32_on_cpu` it is to be trained on a CPU in 32 bits:
    refuse channels_last where the gradient of a filter corrupts memory, and compiling, which always lays out so.
    """
    check = partial(_check, half_on_cpu=half_on_cpu, fp32_on_cpu=fp32_on_cpu, compile_mode=compile_mode)
    try:
        return check(section, plan, torch.device("meta"))
    except RecipeError:
        if not is_own_model(section.name):
            raise
        few = replace(plan, micro_batch=min(plan.micro_batch, _FEW), eval_batch=min(plan.eval_batch, _FEW))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return check(section, few, torch.device("cpu"))


def _check(
    section: Model, plan: Plan, device: torch.device, *, half_on_cpu: str, fp32_on_cpu: bool, compile_mode: str
) -> tuple[str, ...]:
    sizes = sorted({size for _, size in plan.train_sizes})
    with _refusal(section, _shape(plan, plan.micro_batch, sizes[0])):
        model = build_on(section, plan, device)
        as_made = modes(model)
        set_training(section, model, plan.num_classes)
    notes = (_undone(section, thawed(as_made, model)), what_is_trained(section, model))
    check_memory_format(section, model)
    if fp32_on_cpu:
        _check_gradients(section, model, compile_mode)
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


def _check_gradients(section: Model, model: nn.Module, compile_mode: str) -> None:
    """Raise `RecipeError` where a filter that is trained would have its gradient computed beyond a buffer."""
    found = [name for name in overflowing_gradients(model) if model.get_submodule(name).weight.requires_grad]
    if not found or (section.memory_format != "channels_last" and compile_mode == "off"):
        return
    layer = model.get_submodule(found[0])
    what = f"{found[0]}, a 1x1 convolution of {layer.in_channels} channels with a stride"
    why = f"corrupts memory on a CPU, in the gradient of {what} (a bug of torch's oneDNN below {_FEW_INPUTS} channels"
    if compile_mode != "off":  # torch.compile turns what is contiguous into channels_last
        raise RecipeError(f"train.compile: {compile_mode} {why}; set train.compile=off)")
    raise RecipeError(f"model.memory_format: channels_last {why}; set model.memory_format=auto)")


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
