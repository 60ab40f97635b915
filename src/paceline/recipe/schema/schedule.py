"""The learning-rate schedule: one typed variant each, chosen by `schedule.name`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.recipe.schema.section import Section, TrainingDuration


class _WarmedUp(Section):
    """What every schedule but one_cycle, whose rise is its warm-up, has."""

    warmup: TrainingDuration = "0st"
    """Length of the rise from `warmup_start` to the peak."""
    warmup_start: float = Field(0.0, ge=0, le=1)
    """Share of the peak that the rise starts from."""
    warmup_shape: Literal["linear", "exponential", "constant"] = "linear"
    """Rise along a line, by a constant factor a step, or stay at `warmup_start` and jump (Goyal et al. 2017)."""
    warmup_by: Literal["step", "epoch"] = "step"
    """Rise at every step, or once per epoch, as torch's LinearLR that is stepped per epoch: the first epoch has
    `warmup_start`, and where that is 0, which would train nothing, epoch e of n has e/n."""

    @model_validator(mode="after")
    def _rise_can_start(self) -> Self:
        shape = self.warmup_shape
        if shape != "linear" and self.warmup.value == 0:
            raise ValueError(f"warmup_shape {shape} has no effect without warm-up (set warmup=5ep)")
        if self.warmup_start != 0 and self.warmup.value == 0:
            raise ValueError("warmup_start has no effect without warm-up (set warmup=5ep)")
        if shape != "linear" and self.warmup_start == 0:
            raise ValueError(f"warmup_shape {shape} cannot start from 0 (set warmup_start=0.1)")
        return self

    @model_validator(mode="after")
    def _has_whole_epochs(self) -> Self:
        if self.warmup_by == "step":
            return self
        if self.warmup.value == 0:
            raise ValueError("warmup_by epoch has no effect without warm-up (set warmup=5ep)")
        if self.warmup.unit != "ep" or self.warmup.value != int(self.warmup.value):
            raise ValueError(f"warmup_by epoch needs whole epochs, and warmup is {self.warmup} (set warmup=5ep)")
        if self.warmup_shape == "constant":
            raise ValueError("warmup_by epoch has no effect with warmup_shape constant (set warmup_by=step)")
        return self


class Constant(_WarmedUp):
    """The peak learning rate, all the way."""

    name: Literal["constant"] = "constant"


class Cosine(_WarmedUp):
    """Half a cosine from the peak to `final` (Loshchilov and Hutter 2017, without restarts)."""

    name: Literal["cosine"] = "cosine"
    final: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


class Linear(_WarmedUp):
    """A straight line from the peak to `final`."""

    name: Literal["linear"] = "linear"
    final: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


class Polynomial(_WarmedUp):
    """From the peak to `final` along (1 - t) to a power, as large-batch recipes do (You et al. 2017)."""

    name: Literal["polynomial"] = "polynomial"
    power: float = Field(2.0, gt=0)
    """The power; 1 is a straight line."""
    final: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


class Step(_WarmedUp):
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


class Plateau(_WarmedUp):
    """Multiply by `factor` when the validation loss has not improved for more than `patience` evaluations. Those within
    the warm-up, the one at its end too, do not count."""

    name: Literal["plateau"] = "plateau"
    factor: float = Field(0.2, gt=0, lt=1)
    """By how much."""
    patience: int = Field(10, ge=0)
    """Evaluations without improvement that are let pass."""
    threshold: float = Field(1e-4, ge=0)
    """Relative improvement that counts."""


ScheduleSection = Annotated[
    Constant | Cosine | Linear | Polynomial | Step | OneCycle | Plateau, Field(discriminator="name")
]
