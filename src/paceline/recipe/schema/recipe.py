"""The recipe: everything a run was asked to do. Defaults are written here and nowhere else."""

import hashlib
import json
from typing import Any, Literal, Self, cast

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from paceline.recipe.schema.augment import AugmentSection, RandomResizedCrop, Resize
from paceline.recipe.schema.optim import Constant, OptimSection, Plateau, ScheduleSection, Sgd
from paceline.recipe.schema.section import Auto, CadenceDuration, Off, Section, Switch, TimeDuration
from paceline.recipe.schema.source import Digits, SourceSection


class Data(Section):
    """What is read, in which batches, and how it is changed on the way."""

    source: SourceSection = Digits()
    """Where samples come from."""
    batch_size: int = Field(128, ge=1)
    """Images an optimizer step, over all ranks and micro-batches."""
    eval_batch_size: PositiveInt | Auto = "auto"
    """Images a rank evaluates at once; `auto` is twice what a rank trains at once."""
    image_size: PositiveInt | Auto = "auto"
    """Height and width the model sees; `auto` is the set's own size, or 224 where sizes differ."""
    augment: tuple[AugmentSection, ...] = ()
    """Random changes to training images, in order; the ones that set the size come first."""
    eval_resize: Literal["crop", "stretch"] = "crop"
    """Photographs in evaluation: scale the short side and cut the centre, or stretch the whole image."""
    eval_crop: float = Field(0.875, gt=0, le=1)
    """Share of the scaled image's side that the centre crop keeps."""
    mean: tuple[float, ...] | Auto = "auto"
    """Per channel, of pixels in [0, 1]; `auto` is the data set's."""
    std: tuple[PositiveFloat, ...] | Auto = "auto"
    """Per channel, of pixels in [0, 1]; `auto` is the data set's."""
    workers: NonNegativeInt | Auto = "auto"
    """Processes a rank decodes with; 0 decodes in the rank itself."""

    @field_validator("augment")
    @classmethod
    def _sizes_come_first(cls, augment: tuple[Section, ...]) -> tuple[Section, ...]:
        for position, section in enumerate(augment):
            if position > 0 and isinstance(section, RandomResizedCrop | Resize):
                raise ValueError(f"{section.name} sets the size of the image, so it comes first, and only once")
        return augment


class Model(Section):
    """The network."""

    name: str = "resnet18_cifar"
    """One of ours (`resnet18_cifar`, `resnet34_cifar`, `resnet50_cifar`, `resnet50_nersc`, `wideresnet_course`),
    `torchvision:NAME` or `timm:NAME`."""
    norm: Literal["batch", "group", "none"] = "batch"
    """Normalisation layers of our own networks."""
    width: float = Field(1.0, gt=0)
    """Multiplies the channels of our own networks."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Layout of images and filters; `auto` is channels_last, which was never slower (benchmarks/memory_format.py)."""


class Stop(Section):
    """Stop before the end, at a target held for several evaluations."""

    top1: float = Field(gt=0, le=1)
    """Validation top-1 accuracy to reach."""
    patience: int = Field(1, ge=1)
    """Evaluations in a row that must reach it."""


class Train(Section):
    """How long, how precisely, and how it is judged."""

    epochs: PositiveFloat | Auto = "auto"
    """Passes over the training split; `auto` when `steps` is given."""
    steps: PositiveInt | Auto = "auto"
    """Optimizer steps; `auto` when `epochs` is given."""
    precision: Literal["fp64", "fp32", "bf16"] = "fp32"
    """fp32, bfloat16 autocast over fp32 weights, or fp64 to tell rounding from a real difference."""
    accumulate: int = Field(1, ge=1)
    """Micro-batches a rank's share of the batch is split into."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Probability spread evenly over all classes."""
    eval_every: CadenceDuration | Off = "1ep"
    """How often to evaluate; the end of the run always is, unless off."""
    stop: Stop | Off = "off"
    """Target at which the run ends early."""

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if (self.epochs == "auto") == (self.steps == "auto"):
            raise ValueError("how long to train must be said once (set either epochs or steps)")
        if self.stop != "off" and self.eval_every == "off":
            raise ValueError("stop has no effect with eval_every off (set eval_every=1ep)")
        return self


class Parallel(Section):
    """How ranks work together. How many there are is not part of a recipe."""

    strategy: Literal["ddp"] = "ddp"
    """What joins the ranks; one rank needs nothing."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where each rank computes; `auto` is a GPU when there is one."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective library; `auto` is nccl for GPUs and gloo for CPUs."""
    timeout: TimeDuration = "10min"
    """How long a rank waits for another before the run fails."""
    threads: PositiveInt | Auto = "auto"
    """CPU threads a rank computes with; `auto` shares the node's cores. Another number gives other bits."""


class Checkpoint(Section):
    """When the state is saved, and how many saves are kept."""

    every: CadenceDuration | Off = "1ep"
    """How often; the end of the run always is, unless off."""
    keep: int = Field(3, ge=1)
    """Newest checkpoints kept, beside the best one."""


class Measure(Section):
    """How a run is timed."""

    clock: Switch = "on"
    """Time each stage of a step."""
    warmup_steps: int = Field(10, ge=0)
    """First steps left out of throughput and stages."""


class Log(Section):
    """What is written down, and how often."""

    every: CadenceDuration = "10st"
    """Steps between records of loss and throughput."""
    tensorboard: Literal["auto", "on", "off"] = "auto"
    """Write TensorBoard events; `auto` does when it is installed."""
    samples: bool = False
    """Each rank writes the samples of every step, with a checksum of their augmented pixels."""


class Recipe(Section):
    """Everything a run was asked to do; two runs of one recipe differ only in their machine."""

    seed: int = Field(0, ge=0, lt=2**63)
    """Decides initial weights, the order of samples and every random augmentation."""
    data: Data = Data()
    """What is read and how."""
    model: Model = Model()
    """The network."""
    optim: OptimSection = Sgd()
    """The optimizer."""
    schedule: ScheduleSection = Constant()
    """The learning rate over the run."""
    train: Train
    """How long and how."""
    parallel: Parallel = Parallel()
    """How ranks work together."""
    checkpoint: Checkpoint = Checkpoint()
    """When the state is saved."""
    measure: Measure = Measure()
    """How the run is timed."""
    log: Log = Log()
    """What is written down."""

    @model_validator(mode="after")
    def _plateau_sees_evaluations(self) -> Self:
        if isinstance(self.schedule, Plateau) and self.train.eval_every == "off":
            raise ValueError("schedule plateau has no effect with train.eval_every off (set train.eval_every=1ep)")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the whole recipe as plain values that load again to an equal recipe; names come first."""
        return cast(dict[str, Any], _names_first(self.model_dump(mode="json")))

    @property
    def hash(self) -> str:
        """Return 12 hex digits that are equal for equal recipes: the experiment's identity."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def _names_first(value: object) -> object:
    """Sort the `name` of a variant to the front of its section, where a reader looks for it."""
    if isinstance(value, list):
        return [_names_first(item) for item in value]
    if not isinstance(value, dict):
        return value
    ordered = sorted(value, key=lambda key: key != "name")
    return {key: _names_first(value[key]) for key in ordered}
