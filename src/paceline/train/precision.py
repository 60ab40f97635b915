"""Which number format a step computes in: of the weights, of the products, and what keeps small numbers alive.

A precision is put together from three choices: an autocast or none, `Weights` (the model's own, or 16-bit ones with
a master copy in float32), and a `Scale` of the loss (none, or a dynamic one for float16's narrow range).
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError
from paceline.models.trial import check_model
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.train import PrecisionName

FIRST_SCALE = 2.0**16
_GROWTH_STEPS = 2000


class Scale(Protocol):
    """What the loss is multiplied by, so that gradients of small size survive a narrow format."""

    @property
    def value(self) -> float:
        """The factor."""
        ...

    def undo(self, gradients: Sequence[Tensor]) -> None:
        """Divide `gradients` by the factor in place."""
        ...

    def grew_too_large(self) -> bool:
        """Take note of gradients that overflowed; return whether a smaller factor may help."""
        ...

    def fitted(self) -> None:
        """Take note of gradients that did not."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain values."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        ...


class NoScale:
    """The loss as it is: the format has float32's range."""

    value = 1.0

    def undo(self, gradients: Sequence[Tensor]) -> None:
        """Do nothing."""

    def grew_too_large(self) -> bool:
        """Return False: there is nothing to lower."""
        return False

    def fitted(self) -> None:
        """Take no note."""

    def state(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over nothing."""


@dataclass
class DynamicScale:
    """A factor that halves when gradients overflow and doubles after 2,000 steps in a row without.

    Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740), section 3.2; the numbers are those of
    torch's GradScaler. That class is not used because it would look for overflow a second time.
    """

    value: float = FIRST_SCALE
    good_steps: int = 0

    def undo(self, gradients: Sequence[Tensor]) -> None:
        """Divide by the factor, a power of two: exact but for what falls below the smallest number of the format."""
        torch._foreach_mul_(list(gradients), 1 / self.value)

    def grew_too_large(self) -> bool:
        """Halve the factor; return False when it has reached 1, where the gradients themselves are to blame."""
        self.good_steps = 0
        if self.value <= 1.0:
            return False
        self.value /= 2
        return True

    def fitted(self) -> None:
        """Count the step, and double the factor when there have been enough."""
        self.good_steps += 1
        if self.good_steps == _GROWTH_STEPS:
            self.value, self.good_steps = self.value * 2, 0

    def state(self) -> dict[str, Any]:
        """Return factor and count."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over factor and count."""
        self.value, self.good_steps = state["value"], state["good_steps"]


Named = Sequence[tuple[str, nn.Parameter]]


class Weights(Protocol):
    """What the optimizer moves."""

    def named(self, model: nn.Module) -> Named:
        """Return the names of `model`'s parameters and what the optimizer moves for them, once, after `prepare`."""
        ...

    def collect(self) -> None:
        """Bring the model's gradients to what the optimizer moves."""
        ...

    def spread(self) -> None:
        """Bring what the optimizer moved to the model."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint must hold beside the model's weights, by name."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` returned."""
        ...


class OwnWeights:
    """The model's own parameters."""

    def named(self, model: nn.Module) -> Named:
        """Return the model's parameters."""
        return list(model.named_parameters())

    def collect(self) -> None:
        """Do nothing: the gradients are there."""

    def spread(self) -> None:
        """Do nothing: the model has moved."""

    def tensors(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over nothing."""


@dataclass
class MasterWeights:
    """float32 copies of 16-bit parameters, so that updates smaller than a 16-bit step add up (arXiv 1710.03740)."""

    _pairs: list[tuple[str, nn.Parameter, nn.Parameter]] = field(default_factory=list)

    def named(self, model: nn.Module) -> Named:
        """Make and return the copies; parameters that are in float32 already, as norms are, stay themselves."""
        assert not self._pairs, "the copies are made once"
        named = []
        for name, parameter in model.named_parameters():
            if parameter.dtype.itemsize > 2 or not parameter.requires_grad:
                named.append((name, parameter))
                continue
            master = nn.Parameter(parameter.detach().float())
            self._pairs.append((name, parameter, master))
            named.append((name, master))
        return named

    def collect(self) -> None:
        """Give each copy its parameter's gradient, in float32, and let go of that."""
        for _, parameter, master in self._pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    def spread(self) -> None:
        """Round the copies into the model."""
        with torch.no_grad():
            for _, parameter, master in self._pairs:
                parameter.copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        """Return the copies."""
        return {name: master.detach() for name, _, master in self._pairs}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the copies."""
        with torch.no_grad():
            for name, _, master in self._pairs:
                master.copy_(tensors[name])


@dataclass(frozen=True)
class Precision:
    """A number format: `dtype` of weights and images, `autocast_dtype` of products (None: the same), and the rest."""

    device_type: str
    dtype: torch.dtype = torch.float32
    autocast_dtype: torch.dtype | None = None
    weights: Weights = field(default_factory=OwnWeights)
    scale: Scale = field(default_factory=NoScale)

    def lower(self, model: nn.Module) -> None:
        """Bring `model` to the format in place. Beside master weights, batch norms stay in float32 as in Apex's O2.

        Running statistics in 16 bits would stand still: a step of 0.1 is lost beside a value 256 times as large.
        """
        model.to(self.dtype)
        if isinstance(self.weights, MasterWeights):
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.float()

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return what surrounds the forward pass."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast_dtype)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of `loss`, a tensor [], times the scale.

        A loss that is no number makes every gradient NaN, on this rank and, averaged, on all, or, where each rank
        trains alone, the norm that they share: that is how the ranks agree on it without a word.
        """
        marked = torch.where(torch.isfinite(loss.detach()), self.scale.value, torch.nan)
        (loss * marked).backward()  # type: ignore[no-untyped-call]


def build_precision(name: PrecisionName, device: torch.device) -> Precision:
    """Return the precision called `name` on `device`. Raise `RecipeError` where the device does not have it."""
    kind, _, scheme = resolve(name, device).partition("_")
    _check(name, kind, scheme, device)
    if name in ("fp64", "fp32", "torch_default", "tf32"):
        return Precision(device.type, torch.float64 if kind == "fp64" else torch.float32)
    half = torch.float16 if kind == "fp16" else torch.bfloat16
    scale: Scale = DynamicScale() if kind == "fp16" else NoScale()
    match scheme:
        case "master":
            return Precision(device.type, half, weights=MasterWeights(), scale=scale)
        case "pure":
            return Precision(device.type, half, scale=scale)
    return Precision(device.type, autocast_dtype=half, scale=scale)


def resolve(name: PrecisionName, device: torch.device) -> PrecisionName:
    """Return the format that `amp` is on `device`: bf16 where it is computed natively, else fp16; others stay."""
    if name != "amp":
        return name
    is_native = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)
    return "bf16" if is_native else "fp16"


def half_on_cpu(name: PrecisionName, device: torch.device) -> str:
    """Return the name of the 16 bits that `name` computes in where `device` is a CPU; else nothing."""
    if device.type != "cpu":
        return ""
    resolved = resolve(name, device)
    return resolved if resolved.startswith("bf16") else ""


def check_trained_model(recipe: Recipe, plan: Plan, device: torch.device) -> tuple[str, ...]:
    """Check the network of `recipe` as it is to be trained on `device`; see `models.trial.check_model`."""
    half = half_on_cpu(recipe.train.precision, device)
    is_fp32_on_cpu = device.type == "cpu" and not half
    return check_model(
        recipe.model, plan, half_on_cpu=half, fp32_on_cpu=is_fp32_on_cpu, compile_mode=recipe.train.compile
    )


def set_numerics(name: PrecisionName, device: torch.device, *, benchmark: bool) -> None:
    """Let a GPU's products use TF32 only where the recipe says so, and cuDNN time its algorithms if `benchmark`.

    `torch_default` is what PyTorch has set since 1.12: cuDNN's convolutions may use TF32, matrix products may not
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices).
    """
    if device.type != "cuda":
        return
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.allow_tf32 = name not in ("fp32", "fp64")
    products_may_round = name not in ("fp32", "fp64", "torch_default")
    torch.set_float32_matmul_precision("high" if products_may_round else "highest")


def _check(name: str, kind: str, scheme: str, device: torch.device) -> None:
    if device.type == "cuda":
        return
    instead = {"fp16": "bf16", "tf32": "fp32"}.get(kind)
    if instead:
        other = f"{instead}_{scheme}" if scheme else instead
        raise RecipeError(
            f"train.precision: {name} needs a GPU, and this run is on a CPU (set train.precision={other})"
        )
