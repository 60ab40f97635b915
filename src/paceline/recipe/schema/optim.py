"""The optimizer and the learning-rate schedule: one typed variant each, chosen by `name`."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from paceline.recipe.schema.section import Auto, Section, TrainingDuration

Betas = tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]


class _Optimizer(Section):
    """What every optimizer has."""

    lr: float = Field(0.1, gt=0)
    """Peak learning rate at `base_batch_size`."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate follows the batch size: times B/base, its square root, or not at all."""
    base_batch_size: PositiveInt | Auto = "auto"
    """Batch size that `lr` was chosen for; needed when `lr_scaling` is not none."""
    weight_decay: float = Field(0.0, ge=0)
    """L2 penalty (SGD, Adam) or decoupled decay (AdamW)."""
    decay_norm_and_bias: bool = True
    """Whether the decay also pulls on biases and normalisation parameters."""

    @model_validator(mode="after")
    def _says_what_takes_effect(self) -> Self:
        if self.lr_scaling == "none" and self.base_batch_size != "auto":
            raise ValueError("base_batch_size has no effect with lr_scaling none (set lr_scaling=linear or sqrt)")
        if self.lr_scaling != "none" and self.base_batch_size == "auto":
            raise ValueError(
                f"lr_scaling {self.lr_scaling} needs the batch size lr was chosen for (set base_batch_size)"
            )
        if not self.decay_norm_and_bias and self.weight_decay == 0:
            raise ValueError("decay_norm_and_bias=false has no effect with weight_decay 0 (set weight_decay)")
        return self


class Sgd(_Optimizer):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"] = "sgd"
    momentum: float = Field(0.9, ge=0, lt=1)
    """Share of the last update kept."""
    nesterov: bool = False
    """Look ahead along the momentum."""
    weight_decay: float = Field(5e-4, ge=0)
    """L2 penalty added to the gradient."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov has no effect with momentum 0 (set momentum=0.9)")
        return self


class Adam(_Optimizer):
    """Adam (Kingma and Ba 2015), with L2 weight decay."""

    name: Literal["adam"] = "adam"
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate at `base_batch_size`."""
    betas: Betas = (0.9, 0.999)
    """Decay of the running mean and of the running square of the gradient."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator."""


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    name: Literal["adamw"] = "adamw"  # type: ignore[assignment]
    weight_decay: float = Field(0.01, ge=0)
    """Decay of the weights themselves, times the learning rate."""


OptimSection = Annotated[Sgd | Adam | AdamW, Field(discriminator="name")]


class _Warm(Section):
    """What every schedule but one_cycle, whose rise is its warm-up, has."""

    warmup: TrainingDuration = "0st"
    """Length of a linear rise from `warmup_start` to the peak."""
    warmup_start: float = Field(0.0, ge=0, le=1)
    """Share of the peak that the rise starts from."""


class Constant(_Warm):
    """The peak learning rate, all the way."""

    name: Literal["constant"] = "constant"


class Cosine(_Warm):
    """Half a cosine from the peak to `final` (Loshchilov and Hutter 2017, without restarts)."""

    name: Literal["cosine"] = "cosine"
    final: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


class Linear(_Warm):
    """A straight line from the peak to `final`."""

    name: Literal["linear"] = "linear"
    final: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


class Step(_Warm):
    """Multiply by `factor` at each milestone."""

    name: Literal["step"] = "step"
    milestones: tuple[TrainingDuration, ...] = Field(min_length=1)
    """When, counted from the start of the run."""
    factor: float = Field(0.1, gt=0, lt=1)
    """By how much."""


class OneCycle(Section):
    """Rise to the peak and fall again, both along a cosine (Smith and Topin 2017)."""

    name: Literal["one_cycle"] = "one_cycle"
    peak_at: TrainingDuration = "30%"
    """When the peak is reached."""
    start: float = Field(0.04, ge=0, le=1)
    """Share of the peak that the rise starts from."""
    final: float = Field(4e-6, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


class Plateau(_Warm):
    """Multiply by `factor` when the validation loss has not improved for more than `patience` evaluations."""

    name: Literal["plateau"] = "plateau"
    factor: float = Field(0.2, gt=0, lt=1)
    """By how much."""
    patience: int = Field(10, ge=0)
    """Evaluations without improvement that are let pass."""
    threshold: float = Field(1e-4, ge=0)
    """Relative improvement that counts."""


ScheduleSection = Annotated[Constant | Cosine | Linear | Step | OneCycle | Plateau, Field(discriminator="name")]
