"""The recipe's sections `train`, `log` and `parallel`."""

import math
from typing import Annotated, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from paceline.recipe.schema.base import (
    NAMED,
    OR_ITS_NAME,
    Auto,
    ByName,
    CadenceDuration,
    Off,
    PluginSection,
    Section,
    Switch,
    TimeDuration,
)

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


_REFUSED: Final = "/\\#?%:"
"""What the name of a project of W&B's may not have (https://docs.wandb.ai/ref/python/init), so that one fits all."""


def _checked_title(title: str) -> str:
    if not title.isprintable() or not 0 < len(title) <= 128 or set(title) & set(_REFUSED):
        raise ValueError(f"{title!r} is no name: 1 to 128 characters but {' '.join(_REFUSED)} (write another)")
    return title


Title = Annotated[str, AfterValidator(_checked_title)]


class Wandb(Section):
    """Tell Weights & Biases."""

    name: Literal["wandb"] = "wandb"
    project: Title = "paceline"
    """What the run is filed under."""
    entity: Title = "auto"
    """Whose project it is: a user's or a team's; `auto`: the user's own."""
    mode: Literal["auto", "offline", "online"] = "auto"
    """`auto`: what WANDB_MODE says; else online for who is logged in (WANDB_API_KEY or `wandb login`), offline for
    anyone else. Offline, nothing leaves the run directory before `wandb sync` is told to."""


class Mlflow(Section):
    """Tell MLflow: the server or store in MLFLOW_TRACKING_URI, or files in the run directory."""

    name: Literal["mlflow"] = "mlflow"
    experiment: Title = "paceline"
    """What the run is filed under."""


class Trackio(Section):
    """Tell trackio, which keeps a database for each project on this machine."""

    name: Literal["trackio"] = "trackio"
    project: Title = "paceline"
    """What the run is filed under."""


class OwnSink(PluginSection):
    """A sink of your own: `NAME(run_dir=..., **args)` makes what is told
    ([the contract](../how-to/extend.md#a-sink-of-your-own))."""


SinkSection = Annotated[
    Annotated[Wandb | Mlflow | Trackio | OwnSink, ByName()],
    NAMED,
    OR_ITS_NAME,
]


class Log(Section):
    """What is written down, and how often."""

    every: CadenceDuration = "10st"
    """Steps between records of loss and throughput."""
    tensorboard: Literal["auto", "on", "off"] = "auto"
    """Write TensorBoard events; `auto` does when it is installed."""
    sinks: tuple[SinkSection, ...] = ()
    """Trackers of experiments that are told of the run too, beside its own files."""
    samples: bool = False
    """Each rank writes the samples of every step, with a checksum of their pixels as the loader hands them over: with
    all augmentation where that is done on the host."""
    worst: int = Field(16, ge=0, le=100)
    """Misclassified validation images that are kept as thumbnails, those of the highest loss; 0: none."""
    report: Switch = "on"
    """Write `report.html` at the end."""

    @field_validator("sinks")
    @classmethod
    def _are_different(cls, sinks: tuple[SinkSection, ...]) -> tuple[SinkSection, ...]:
        for position, section in enumerate(sinks):
            if any(each.name == section.name for each in sinks[:position]):
                raise ValueError(f"{section.name} is named twice (name it once)")
        return sinks


_ONLY_FOR_STRATEGY = {
    "bucket_mb": "ddp",
    "bucket_view": "ddp",
    "static_graph": "ddp",
    "compression": "ddp",
    "powersgd_rank": "ddp",
    "check_replicas": "ddp",
    "sync_gradients": "ddp",
    "reshard": "fsdp",
}


class Parallel(Section):
    """How ranks work together. How many there are is not part of a recipe."""

    strategy: Literal["ddp", "fsdp", "dataparallel"] = "ddp"
    """ddp keeps a replica on every rank, fsdp shards weights, gradients and optimizer over them (FSDP2), and
    dataparallel drives all GPUs from one process, for comparison. One rank needs nothing."""
    bucket_mb: PositiveFloat | Auto = "auto"
    """MiB of gradient that ddp sends at once; `auto` is torch's 25, after a first bucket of 1."""
    bucket_view: bool = True
    """ddp: gradients are views into what is sent, which saves a copy of each."""
    static_graph: bool = False
    """ddp: promise that every step uses the same parameters in the same order."""
    compression: Off | Literal["bf16", "fp16", "powersgd"] = "off"
    """ddp: send gradients in 16 bits, or as low-rank factors (Vogels et al. 2019, arXiv 1905.13727)."""
    sync_gradients: bool = True
    """ddp: average gradients over the ranks. false is a probe of what communication costs: each rank trains alone, and
    its weights go their own way. Gradients and buffers stay where they are, but a late rank is still waited for: in
    each step the ranks share one number, the mean of their gradients' norms, so that all stop or skip alike, and votes
    on saving and leaving, which a step waits for in the next; the losses that are logged stay means over the ranks.
    `model.norm=sync_batch` is communication of its own, which stays."""
    powersgd_rank: PositiveInt | Auto = "auto"
    """Rank of the factors; `auto` is 1."""
    reshard: bool = False
    """fsdp: drop gathered weights after forward and gather them again in backward: less memory, more to send."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where each rank computes; `auto` is a GPU when there is one."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective library; `auto` is nccl for GPUs and gloo for CPUs."""
    timeout: TimeDuration = "10min"
    """How long a rank waits for another, or for its own step to end, before the run fails."""
    check_replicas: CadenceDuration | Off = "off"
    """ddp: compare the ranks' weights, by a hash, every so many steps, and end the run where they differ."""
    threads: PositiveInt | Auto = "auto"
    """CPU threads a rank computes with; `auto` shares the node's cores. Another number gives other bits."""

    @model_validator(mode="after")
    def _options_belong_to_the_strategy(self) -> Self:
        for name, strategy in _ONLY_FOR_STRATEGY.items():
            default = type(self).model_fields[name].default
            if getattr(self, name) != default and self.strategy != strategy:
                raise ValueError(f"{name} has no effect with strategy {self.strategy} (set strategy={strategy})")
        for name in ("check_replicas", "compression", "static_graph"):
            if not self.sync_gradients and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with sync_gradients false (set sync_gradients=true)")
        if self.powersgd_rank != "auto" and self.compression != "powersgd":
            raise ValueError(
                f"powersgd_rank has no effect with compression {self.compression} (set compression=powersgd)"
            )
        return self
