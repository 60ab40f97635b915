"""Numeric precision of a step: autocast, master weights, and loss scaling."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError
from paceline.models.validate import check_adapters, check_model
from paceline.recipe.plan import Plan
from paceline.recipe.schema.model import Model
from paceline.recipe.schema.train import PrecisionName, Train

INITIAL_SCALE = 2.0**16
_GROWTH_INTERVAL = 2000


@dataclass
class DynamicLossScaler:
    """Scale the loss, so that small gradients do not underflow in float16.

    The scale halves at each overflow and doubles after 2,000 steps without one (Micikevicius et al. 2018, Mixed
    Precision Training, arXiv 1710.03740, section 3.2); constants as in torch's GradScaler.
    """

    # Not torch's GradScaler: it would check for overflow a second time.
    value: float = INITIAL_SCALE
    good_steps: int = 0

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide by the scale."""
        # The scale is a power of two, so this is exact except for underflow.
        torch._foreach_mul_(list(gradients), 1 / self.value)

    def backoff(self) -> bool:
        """Halve the scale; return False at 1, where the gradients themselves are to blame."""
        self.good_steps = 0
        if self.value <= 1.0:
            return False
        self.value /= 2
        return True

    def update(self) -> None:
        """Count the step, and double the scale after enough of them."""
        self.good_steps += 1
        if self.good_steps == _GROWTH_INTERVAL:
            self.value, self.good_steps = self.value * 2, 0

    def state_dict(self) -> dict[str, Any]:
        """Return scale and count."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load scale and count."""
        self.value, self.good_steps = state["value"], state["good_steps"]


NamedParameters = Sequence[tuple[str, nn.Parameter]]


@dataclass
class MasterWeights:
    """float32 master copies of 16-bit parameters, which accumulate small updates (arXiv 1710.03740)."""

    _pairs: list[tuple[str, nn.Parameter, nn.Parameter]] = field(default_factory=list)

    def create(self, model: nn.Module) -> NamedParameters:
        """Create and return the copies; float32 parameters, such as norms, are not copied."""
        assert not self._pairs, "the master copies are created once"
        named = []
        for name, parameter in model.named_parameters():
            if parameter.dtype.itemsize > 2 or not parameter.requires_grad:
                named.append((name, parameter))
                continue
            master = nn.Parameter(parameter.detach().float())
            self._pairs.append((name, parameter, master))
            named.append((name, master))
        return named

    def copy_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the master copy of `parameter`, or itself without one."""
        return next((master for _, original, master in self._pairs if original is parameter), parameter)

    def copy_grads(self) -> None:
        """Copy each gradient to its master parameter in float32, and free the original."""
        for _, parameter, master in self._pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    def copy_to_model(self) -> None:
        """Round the master copies into the model."""
        with torch.no_grad():
            for _, parameter, master in self._pairs:
                parameter.copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        """Return the master copies."""
        return {name: master.detach() for name, _, master in self._pairs}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the master copies."""
        with torch.no_grad():
            for name, _, master in self._pairs:
                master.copy_(tensors[name])


@dataclass(frozen=True)
class Precision:
    """Numeric precision: `dtype` is that of weights and images, `autocast_dtype` None without autocast."""

    device_type: str
    dtype: torch.dtype = torch.float32
    autocast_dtype: torch.dtype | None = None
    master: MasterWeights | None = None
    scaler: DynamicLossScaler | None = None

    def optimized_parameters(self, model: nn.Module) -> NamedParameters:
        """Return the parameters that the optimizer updates, by the model's names. Call it once, after `prepare`."""
        return self.master.create(model) if self.master else list(model.named_parameters())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint needs beside the model's weights, by name."""
        return self.master.tensors() if self.master else {}

    def cast_model(self, model: nn.Module) -> None:
        """Cast `model` in place; with master weights, BatchNorm stays in float32, as in Apex's O2."""
        model.to(self.dtype)
        # Running statistics in 16 bits would not move: an update of 0.1 rounds to zero next to a value of 256.
        if self.master:
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.float()

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of the forward pass."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast_dtype)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of `loss` [] times the scale; a non-finite loss makes every gradient NaN."""
        # NaN in one gradient reaches all ranks by averaging, or by the shared norm: ranks agree without communication.
        marked = torch.where(torch.isfinite(loss.detach()), self.scaler.value if self.scaler else 1.0, torch.nan)
        (loss * marked).backward()  # type: ignore[no-untyped-call]


def build_precision(name: PrecisionName, device: torch.device) -> Precision:
    """Return the precision called `name`. Raise `RecipeError` if the device does not support it."""
    kind, _, scheme = resolve_precision(name, device).partition("_")
    _check_device_support(name, kind, scheme, device)
    if name in ("fp64", "fp32", "torch_default", "tf32"):
        return Precision(device.type, torch.float64 if kind == "fp64" else torch.float32)
    half = torch.float16 if kind == "fp16" else torch.bfloat16
    scaler = DynamicLossScaler() if kind == "fp16" else None
    match scheme:
        case "master":
            return Precision(device.type, half, master=MasterWeights(), scaler=scaler)
        case "pure":
            return Precision(device.type, half, scaler=scaler)
    return Precision(device.type, autocast_dtype=half, scaler=scaler)


def resolve_precision(name: PrecisionName, device: torch.device) -> PrecisionName:
    """Return `name`, with `amp` replaced by bf16 if `device` supports it natively, else by fp16."""
    if name != "amp":
        return name
    is_native = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)
    return "bf16" if is_native else "fp16"


def cpu_half_precision(name: PrecisionName, device: torch.device) -> str:
    """Return the 16-bit format of `name` on a CPU, or ""."""
    if device.type != "cpu":
        return ""
    resolved = resolve_precision(name, device)
    return resolved if resolved.startswith("bf16") else ""


def check_trained_model(model: Model, train: Train, plan: Plan, device: torch.device) -> tuple[str, ...]:
    """Check `model` as it will be trained on `device`; see `models.validate.check_model` and `check_adapters`."""
    half = cpu_half_precision(train.precision, device)
    is_fp32_on_cpu = device.type == "cpu" and not half
    notes = check_model(model, plan, half_on_cpu=half, fp32_on_cpu=is_fp32_on_cpu, compile_mode=train.compile)
    return notes if model.lora == "off" else (*notes, check_adapters(model, plan))


def set_numerics(name: PrecisionName, device: torch.device, *, benchmark: bool) -> None:
    """Set TF32 on a GPU as `train.precision` says, and `torch.backends.cudnn.benchmark`.

    `torch_default` is PyTorch's default since 1.12: TF32 for cuDNN convolutions, but not for matrix products
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices).
    """
    if device.type != "cuda":
        return
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.allow_tf32 = name not in ("fp32", "fp64")
    products_may_round = name not in ("fp32", "fp64", "torch_default")
    torch.set_float32_matmul_precision("high" if products_may_round else "highest")


def _check_device_support(name: str, kind: str, scheme: str, device: torch.device) -> None:
    if device.type == "cuda":
        return
    substitute = {"fp16": "bf16", "tf32": "fp32"}.get(kind)
    if substitute:
        other = f"{substitute}_{scheme}" if scheme else substitute
        raise RecipeError(
            f"train.precision: {name} needs a GPU, and this run is on a CPU (set train.precision={other})"
        )
