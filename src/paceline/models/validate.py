"""Validate a model before training: a trial forward pass, on the meta device where possible."""

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
from paceline.models.activations import checkpoint_activations
from paceline.models.build import build_model
from paceline.models.catalog import own_image_size
from paceline.models.freeze import (
    describe_trained_parameters,
    find_modules_set_to_train,
    list_frozen,
    record_modes,
    set_trained,
    set_training_mode,
)
from paceline.models.lora import describe_adapters
from paceline.recipe.plan import Plan
from paceline.recipe.schema.base import is_plugin_name
from paceline.recipe.schema.model import Model

_CPU_TRIAL_BATCH: Final = 2
"""Images per trial batch on the CPU."""
_SAFE_IN_CHANNELS: Final = 16
"""Channels that oneDNN's AVX-512 kernel of the weight gradient processes at once; 8 with AVX2."""


def choose_memory_format(
    section: Model, device: torch.device, *, num_classes: int, channels: int
) -> torch.memory_format:
    """Resolve `model.memory_format` for `device`.

    `auto` is channels_last, except on a CPU for models with layers in `find_overflowing_convolutions`.
    """
    if section.memory_format != "auto":
        return torch.contiguous_format if section.memory_format == "contiguous" else torch.channels_last
    if device.type != "cpu":
        return torch.channels_last
    for build_device in (torch.device("meta"), device):
        # A plugin may do what the meta device cannot, such as reading a value.
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with build_device:
                model = build_model(section, num_classes=num_classes, channels=channels)
            return torch.contiguous_format if find_overflowing_convolutions(model) else torch.channels_last
    return torch.channels_last  # the model cannot be built, which `check_model` reports


def find_overflowing_convolutions(model: nn.Module) -> tuple[str, ...]:
    """Return the convolutions whose weight gradient, in channels_last on a CPU, corrupts the heap.

    These are 1x1 convolutions in one group, without padding, with a stride and fewer than 16 input channels.
    """
    # oneDNN copies the images to a buffer of `inputs` numbers per pixel and steps through it by 16 (AVX-512) or 8
    # (AVX2): https://github.com/uxlfoundation/oneDNN/issues/6035, seen with torch 2.15. A crash depends on what lies
    # behind the buffer, so no image size is safe. The forward pass, the gradient of the images, 16-bit types and
    # contiguous tensors are correct. benchmarks/channels_last.py reproduces it with torch alone.
    return tuple(name for name, module in model.named_modules() if _overflows(module))


def _overflows(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d) or module.groups > 1 or module.in_channels >= _SAFE_IN_CHANNELS:
        return False
    is_padded = not isinstance(module.padding, str) and any(module.padding)
    return set(module.kernel_size) == {1} and set(module.stride) != {1} and not is_padded


def check_model(
    section: Model, plan: Plan, *, half_on_cpu: str = "", fp32_on_cpu: bool = False, compile_mode: str = "off"
) -> tuple[str, ...]:
    """Run trial batches of each training size and of the evaluation size; return notes for the user.

    `half_on_cpu` names the 16-bit precision of training on a CPU, else ""; `fp32_on_cpu` is True for 32 bits on a CPU.
    Raise `RecipeError` if the model cannot take the images of `plan` or returns no logits, if the memory format has no
    effect, and for convolutions whose gradient is wrong or corrupts memory on a CPU.
    """
    check = partial(_check_on_device, half_on_cpu=half_on_cpu, fp32_on_cpu=fp32_on_cpu, compile_mode=compile_mode)
    try:
        return check(section, plan, torch.device("meta"))
    except RecipeError:
        if not is_plugin_name(section.name):
            raise
        # A plugin may fail on the meta device alone, so try a small batch on the CPU.
        small_plan = replace(
            plan, micro_batch=min(plan.micro_batch, _CPU_TRIAL_BATCH), eval_batch=min(plan.eval_batch, _CPU_TRIAL_BATCH)
        )
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return check(section, small_plan, torch.device("cpu"))


def check_adapters(section: Model, plan: Plan) -> str:
    """Return a note on the adapters of `model.lora`. Raise `RecipeError` as `add_adapters` does."""
    with _raise_as_recipe_error(section, _build_batch_shape(plan, 1, plan.image_size)):
        try:
            return describe_adapters(section, build_model_on_device(section, plan, torch.device("meta")), plan)
        except PacelineError:
            raise
        except Exception:  # a plugin may fail on the meta device alone
            with torch.random.fork_rng(devices=[]):
                return describe_adapters(section, _build_for_plan(section, plan), plan)


def _check_on_device(
    section: Model, plan: Plan, device: torch.device, *, half_on_cpu: str, fp32_on_cpu: bool, compile_mode: str
) -> tuple[str, ...]:
    sizes = sorted({size for _, size in plan.train_sizes})
    with _raise_as_recipe_error(section, _build_batch_shape(plan, plan.micro_batch, sizes[0])):
        model = build_model_on_device(section, plan, device)
        initial_modes = record_modes(model)
        set_training_mode(section, model, plan.num_classes)
        checkpoint_activations(section, model)
        unfrozen = list_frozen(section, model, plan.num_classes) if plan.unfreeze_step else frozenset()
    notes = (
        _describe_reset_modules(section, find_modules_set_to_train(initial_modes, model)),
        describe_trained_parameters(section, model, unfrozen, plan.unfreeze_step),
    )
    set_trained(model, unfrozen, is_trained=True)  # the checks below are of every phase
    check_memory_format(section, model)
    if fp32_on_cpu:
        _check_overflowing_gradients(section, model, compile_mode)
    with _StrideCheck(half_on_cpu) if half_on_cpu else contextlib.nullcontext():
        for size in sizes:
            _try_forward(section, model, _build_batch_shape(plan, plan.micro_batch, size), plan.num_classes, device)
    _try_forward(
        section, model.eval(), _build_batch_shape(plan, plan.eval_batch, plan.eval_image_size), plan.num_classes, device
    )
    return tuple(filter(None, notes))


def _describe_reset_modules(section: Model, names: Sequence[str]) -> str | None:
    """Return a note on modules that a plugin's constructor puts into evaluation mode, which training undoes."""
    if not names:
        return None
    which = f"{names[0] or 'itself'} and {len(names) - 1} more modules" if names[1:] else names[0] or "itself"
    return (
        f"model.name: {section.name} puts {which} into evaluation mode in its constructor, and training undoes that "
        "(do so in train(), or set model.freeze)"
    )


class _StrideCheck(TorchFunctionMode):
    """Refuse convolutions whose weight gradient oneDNN computes from uninitialized memory in 16 bits."""

    # On CPUs with AVX-512, for kernels of more than one pixel on maps smaller than the stride. Refused on all CPUs, so
    # that a recipe is valid on each of them. Seen with torch 2.11 and 2.15, for exactly these of all maps of 1 to 8
    # pixels and strides of 1 to 4. The wrong numbers mostly look plausible.
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
        keywords = kwargs or {}
        if func is torch.conv2d:
            named: dict[str, Any] = {**dict(zip(("input", "weight", "bias", "stride"), args, strict=False)), **keywords}
            self._check_convolution(named["input"], named["weight"], named.get("stride", 1))
        return func(*args, **keywords)

    def _check_convolution(self, images: Tensor, weight: Tensor, stride: int | Sequence[int]) -> None:
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
    """Raise `RecipeError` for an explicit channels_last if `model` has no 2-D convolution."""
    has_conv = any(isinstance(module, nn.Conv2d) for module in model.modules())
    if section.memory_format == "channels_last" and not has_conv:
        raise RecipeError(
            f"model.memory_format: channels_last has no effect on {section.name}, which has no 2-D convolution "
            "(set model.memory_format=contiguous)"
        )


def _check_overflowing_gradients(section: Model, model: nn.Module, compile_mode: str) -> None:
    """Raise `RecipeError` for a trained filter in `find_overflowing_convolutions`."""
    names = [name for name in find_overflowing_convolutions(model) if model.get_submodule(name).weight.requires_grad]
    if not names or (section.memory_format != "channels_last" and compile_mode == "off"):
        return
    layer = model.get_submodule(names[0])
    text = f"{names[0]}, a 1x1 convolution of {layer.in_channels} channels with a stride"
    bug = f"a bug of torch's oneDNN below {_SAFE_IN_CHANNELS} channels"
    why = f"corrupts memory on a CPU, in the gradient of {text} ({bug}"
    if compile_mode != "off":  # torch.compile turns what is contiguous into channels_last
        raise RecipeError(f"train.compile: {compile_mode} {why}; set train.compile=off)")
    raise RecipeError(f"model.memory_format: channels_last {why}; set model.memory_format=auto)")


def _build_batch_shape(plan: Plan, batch: int, size: int) -> tuple[int, ...]:
    return batch, plan.channels, size, size


def _try_forward(
    section: Model, model: nn.Module, shape: tuple[int, ...], num_classes: int, device: torch.device
) -> None:
    with _raise_as_recipe_error(section, shape), device:
        logits = model(torch.zeros(shape))
    wanted = (shape[0], num_classes)
    if isinstance(logits, Tensor) and tuple(logits.shape) == wanted and logits.is_floating_point():
        return
    given = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    raise RecipeError(
        f"model.name: {section.name} gives {given} for images {list(shape)}, not logits {list(wanted)} (return "
        f"one number per class)"
    )


@contextlib.contextmanager
def _raise_as_recipe_error(section: Model, shape: tuple[int, ...]) -> Iterator[None]:
    """Convert any exception of a model at a batch of `shape` to a one-line `RecipeError`."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        taken = "x".join(str(size) for size in shape)
        made_for = "" if is_plugin_name(section.name) else f", made for {own_image_size(section.name)} px,"
        raise RecipeError(
            f"model.name: {section.name}{made_for} cannot take a batch of {taken}: {reason} (change data.image_size, "
            "data.eval_image_size or model.args)"
        ) from None


def build_model_on_device(section: Model, plan: Plan, device: torch.device) -> nn.Module:
    """Build the model for the images and classes of `plan`."""
    try:
        with device, warnings.catch_warnings():
            # A plugin that loads its own weights causes a warning per tensor on the meta device.
            warnings.filterwarnings("ignore", r"for .*: copying from a non-meta parameter in the checkpoint")
            return _build_for_plan(section, plan)
    except NotImplementedError:
        # torchvision's regnets compute their widths with tensors, and read them.
        with torch.random.fork_rng(devices=[]):
            return _build_for_plan(section, plan).to(device)


def _build_for_plan(section: Model, plan: Plan) -> nn.Module:
    return build_model(section, num_classes=plan.num_classes, channels=plan.channels, image_size=plan.image_size)
