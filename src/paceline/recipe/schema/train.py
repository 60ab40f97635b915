"""How long, how precisely, and how it is judged."""

import math
from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from paceline.recipe.schema.section import Auto, CadenceDuration, Off, Section, Switch

PrecisionName = Literal[
    "fp64",
    "fp32",
    "torch_default",
    "tf32",
    "fp16",
    "bf16",
    "amp",
    "fp16_master",
    "bf16_master",
    "fp16_pure",
    "bf16_pure",
]
REPLACED_WHOLE: Final = frozenset({"train.class_weights"})
"""Fields whose mapping is one value, whose keys are data: given anew it replaces the one before it. All other mappings
are laid over those before them, `args` among them, whose keys are settings."""


class Stop(Section):
    """Stop before the end, at a target held for several evaluations."""

    top1: float = Field(gt=0, le=1)
    """Validation top-1 accuracy to reach; of the averaged weights when there are any."""
    patience: int = Field(1, ge=1)
    """Evaluations in a row that must reach it."""


class Ema(Section):
    """An exponential moving average of the weights, evaluated beside the raw ones."""

    decay: float = Field(0.999, gt=0, lt=1)
    """Share of the average that stays at each update."""
    every: PositiveInt = 1
    """Steps between updates."""
    warmup: bool = True
    """Begin with min(decay, (1 + n) / (10 + n)) at update n, so that the first weights are soon forgotten."""


def _as_mode(value: object) -> object:
    """Read `true` as torch's default mode and `false` as off."""
    if isinstance(value, bool):
        return "default" if value else "off"
    return value


def _as_section(value: object) -> object:
    """Read `on` as the section's defaults."""
    if value in ("on", True):
        return {}
    return "off" if value is False else value


def _checked_weights(value: object) -> object:
    """Return `value`. Raise `ValueError` in words that fit what is no weighting of classes."""
    if not isinstance(value, dict):
        if value in ("off", "balanced"):
            return value
        raise ValueError(f"{value!r} is no weighting of classes (write balanced, off or {{CLASS: WEIGHT}})")
    if not value:
        raise ValueError("{} names no class (write balanced, off or {CLASS: WEIGHT})")
    for name, weight in value.items():
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < math.inf:
            raise ValueError(f"the weight of {name!r}, {weight!r}, is no number greater than 0 (give one)")
    return value


class Train(Section):
    """How long, how precisely, and how it is judged."""

    epochs: PositiveFloat | Auto = "auto"
    """Passes over the training split; `auto` when `steps` is given."""
    steps: PositiveInt | Auto = "auto"
    """Optimizer steps; `auto` when `epochs` is given."""
    precision: PrecisionName = "fp32"
    """On a GPU fp32 uses no TF32, torch_default uses it in convolutions alone, as PyTorch does unless told otherwise,
    and tf32 in matrix products too. fp16 and bf16 are by autocast over fp32 weights (fp16 scales the loss), amp is
    whichever of the two the device is made for. `_master` computes on 16-bit weights with a copy in fp32 (Apex's O2),
    `_pure` keeps no copy (O3). fp64 tells rounding from a real difference."""
    accumulate: int = Field(1, ge=1)
    """Micro-batches a rank's share of the batch is split into."""
    clip_norm: PositiveFloat | Off = "off"
    """Largest L2 norm of the gradient; a longer one is scaled down to it."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a NaN or infinite loss or gradient does: end the run at that step, or leave the step out and count it."""
    compile: Annotated[
        Off | Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
        BeforeValidator(_as_mode),
    ] = "off"
    """Compile the model's training pass with `torch.compile` in this mode; `true` is `default`."""
    capture: Switch = "off"
    """GPU: record the whole optimizer step as one CUDA graph, from augmenting on the device to averaging weights, and
    replay it, so that the host launches one thing a step. Where that cannot be, as on several ranks, a note says so."""
    cudnn_benchmark: Switch | Auto = "auto"
    """Let cuDNN time its algorithms and keep the fastest; `auto` does on GPUs when all batches have one size."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Probability spread evenly over all classes."""
    class_weights: Annotated[
        Off | Literal["balanced"] | dict[str, PositiveFloat], BeforeValidator(_checked_weights)
    ] = "off"
    """Weights of the classes in the training loss, where some are rare: `balanced` makes them all count alike, a class
    by the inverse of its images; a mapping gives weights by name, `{dog: 3}`, and those it does not name weigh 1. They
    are scaled to a mean of 1 over the training images, so that only their ratios matter. Evaluation is not weighted."""
    ema: Annotated[Ema | Off, BeforeValidator(_as_section)] = "off"
    """Average the weights; `on` does with the defaults below."""
    eval_every: CadenceDuration | Off = "1ep"
    """How often to evaluate; the end of the run always is, unless off."""
    eval_train: Switch = "off"
    """Evaluate as many training images too, unchanged, and report the gap between the two accuracies."""
    accuracy: Switch = "off"
    """Measure top-1 and top-5 accuracy on the training batches themselves, as the loss is: on augmented images, in
    training mode, by weights that move from batch to batch. The label of mixed images is the class with the largest
    share. Nothing is evaluated for it, and the host waits for the device only where the loss is logged."""
    stop: Stop | Off = "off"
    """Target at which the run ends early."""

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if (self.epochs == "auto") == (self.steps == "auto"):
            raise ValueError("how long to train must be said once (set either epochs or steps)")
        if self.eval_every != "off":
            return self
        for name, value in (("stop", self.stop), ("eval_train", self.eval_train)):
            if value != "off":
                raise ValueError(f"{name} has no effect with eval_every off (set eval_every=1ep)")
        return self
