"""The recipe's sections `train`, `log` and `parallel`."""

import math
from contextlib import suppress
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from paceline.core.errors import RecipeError, suggest_similar
from paceline.core.metric import ALWAYS, COUNTED, ONLY_MULTI_LABEL, SCORED, top_k
from paceline.core.units import TRAINING_UNITS, Duration
from paceline.recipe.schema.base import (
    ACCEPT_NAME,
    IMPORT_PATH_FORM,
    NAME_JSON_SCHEMA,
    PATH_PATTERN,
    Auto,
    ByName,
    CadenceDuration,
    ImportPath,
    Off,
    PluginSection,
    Section,
    Switch,
    TimeDuration,
    as_section,
    check_import_path,
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
NEEDS_EVALUATION: Final = ("stop", "eval_train", "metrics", "monitor", "patience")
"""Fields of `train` that have no effect with `eval_every=off`."""
REPLACED_WHOLE: Final = frozenset({"train.class_weights", "data.sampler.classes"})
"""Mappings whose keys are data: a later layer replaces them. All other mappings, `args` included, are merged key by
key."""


def check_metric(name: str) -> str:
    """Return `name`. Raise `ValueError` unless it is a metric or an import path."""
    if ":" in name:
        return check_import_path(name)
    if name in METRICS or top_k(name):
        return name
    hint = suggest_similar(name, METRICS) or f" (write {', '.join(METRICS)}, top1 to top999 or {IMPORT_PATH_FORM})"
    raise ValueError(f"{name!r} is not a metric{hint}")


def _json_schema(*also: str) -> WithJsonSchema:
    patterns = (r"^top[1-9]\d{0,2}$", PATH_PATTERN)
    texts = [{"type": "string", "pattern": pattern} for pattern in patterns]
    return WithJsonSchema({"anyOf": [{"enum": [*also, *(each for each in METRICS if not top_k(each))]}, *texts]})


METRICS: Final = (*ALWAYS, *COUNTED, *SCORED, *ONLY_MULTI_LABEL)
"""Names of metrics, beside `topK` and import paths."""
Metric = Annotated[str, AfterValidator(check_metric), _json_schema()]
Monitor = Annotated[
    str, AfterValidator(lambda name: name if name == "auto" else check_metric(name)), _json_schema("auto")
]


class Stop(Section):
    """Stop early once a target accuracy is reached."""

    top1: float = Field(gt=0, le=1)
    """Validation top-1 accuracy to reach, measured on the averaged weights if there are any."""
    patience: int = Field(1, ge=1)
    """Number of consecutive evaluations that must reach it."""


class Ema(Section):
    """An exponential moving average of the weights, evaluated in addition to the raw weights."""

    decay: float = Field(0.999, gt=0, lt=1)
    """Fraction of the average that each update keeps."""
    every: PositiveInt = 1
    """Steps between updates."""
    warmup: bool = True
    """Use min(decay, (1 + n) / (10 + n)) at update n, so that the first weights lose their influence quickly."""


def _as_mode(value: object) -> object:
    """Convert `true` to torch's default mode, and `false` to off."""
    if isinstance(value, bool):
        return "default" if value else "off"
    return value


def _as_patience(value: object) -> object:
    """Return a number of evaluations, a duration, or off. Raise `ValueError` with a fix for anything else."""
    if isinstance(value, bool) or (isinstance(value, int | float) and not (value >= 1 and value % 1 == 0)):
        raise ValueError(f"{value!r} is not a patience (write 5 for evaluations, 5ep or off)")
    if isinstance(value, str) and value != "off":
        with suppress(ValueError):
            duration = Duration.parse(value, TRAINING_UNITS)
            if duration.value and not duration.is_time:
                return duration
        raise ValueError(f"{value!r} is not a patience (write 5 for evaluations, 5ep or off)")
    return value


def _check_class_weights(value: object) -> object:
    """Return `value`. Raise `ValueError` for anything but off, balanced or a mapping of class weights."""
    if not isinstance(value, dict):
        if value in ("off", "balanced"):
            return value
        raise ValueError(f"{value!r} is not a class weighting (write balanced, off or {{CLASS: WEIGHT}})")
    if not value:
        raise ValueError("{} names no class (write balanced, off or {CLASS: WEIGHT})")
    for name, weight in value.items():
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < math.inf:
            raise ValueError(f"the weight of {name!r}, {weight!r}, is not a number greater than 0 (give one)")
    return value


class CrossEntropyLoss(Section):
    """Cross-entropy of softmax probabilities."""

    name: Literal["cross_entropy"] = "cross_entropy"


class BceLoss(Section):
    """Binary cross-entropy of each class against the others, on one-hot, smoothed or mixed targets, as timm's
    `BinaryCrossEntropy` (Wightman et al. 2021, arXiv 2110.00476)."""

    name: Literal["bce"] = "bce"
    sum_classes: bool = False
    """Sum over classes instead of the mean, which makes the loss as many times larger."""
    target_threshold: Annotated[float, Field(ge=0, lt=1)] | Off = "off"
    """Targets above this become 1, and others 0, so that mixed images belong to both classes."""


class FocalLoss(Section):
    """Focal loss (Lin et al. 2017, arXiv 1708.02002): cross-entropy times (1 - p)^gamma for a probability p of the true
    class, so that images that are classified well count less. Class weights are the paper's alpha."""

    name: Literal["focal"] = "focal"
    gamma: float = Field(2.0, ge=0)
    """Exponent; 0 is cross-entropy."""
    activation: Literal["softmax", "sigmoid"] = "softmax"
    """`sigmoid` sums a binary focal loss over the classes, as the paper and torchvision's `sigmoid_focal_loss`."""


class OwnLoss(PluginSection):
    """Your own loss: a function `NAME(logits, targets, **args)`, or a class `NAME(**args)` whose object is called with
    `(logits, targets)`. It returns the loss of each image ([the contract](../how-to/extend.md#custom-losses))."""


LossSection = Annotated[
    Annotated[CrossEntropyLoss | BceLoss | FocalLoss | OwnLoss, ByName()],
    ACCEPT_NAME,
    NAME_JSON_SCHEMA,
]


class OwnCallback(PluginSection):
    """Your own callback: `MyCallback(**args)` returns an object that is called during training ([the
    interface](../how-to/extend.md#custom-callbacks))."""


class Distill(Section):
    """Distillation (Hinton et al. 2015, arXiv 1503.02531): the loss of a trained model's predictions, the teacher's,
    for the same augmented images is added to the loss of the labels."""

    teacher: str
    """Run directory, or one of its checkpoints, as `model.weights`; `timm:TAG` or `torchvision:NAME`; or a file of
    weights. It must have the classes of the dataset."""
    model: str | Auto = "auto"
    """Model of the teacher's weights, as `model.name`; `auto` is the run's, or timm's name in TAG."""
    kind: Literal["soft", "hard"] = "soft"
    """`soft`: Kullback-Leibler divergence of the softened probabilities, times the squared temperature. `hard`:
    cross-entropy of the teacher's first class (DeiT, Touvron et al. 2021, arXiv 2012.12877)."""
    weight: float = Field(0.5, gt=0, le=1)
    """Share of the teacher's part in the loss; the labels have the rest."""
    temperature: PositiveFloat = 1.0
    """Divisor of the logits of model and teacher."""

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        if self.kind == "hard" and self.is_set("temperature"):
            raise ValueError("temperature has no effect with kind hard (leave it out)")
        return self


class Train(Section):
    """Length, precision, loss and evaluation."""

    added: ClassVar = (
        "loss",
        "metrics",
        "monitor",
        "patience",
        "max_time",
        "callbacks",
        "clip_agc",
        "label_threshold",
        "distill",
    )

    epochs: PositiveFloat | Auto = "auto"
    """Passes over the training split; `auto` if `steps` is given."""
    steps: PositiveInt | Auto = "auto"
    """Optimizer steps; `auto` if `epochs` is given."""
    precision: PrecisionName = "fp32"
    """Number format. On a GPU, fp32 never uses TF32, torch_default uses it in convolutions, as PyTorch does by default,
    and tf32 uses it in matrix products too. fp16 and bf16 use autocast with fp32 weights, and fp16 scales the loss; amp
    is whichever of the two the device supports in hardware. `_master` computes with 16-bit weights and an fp32 master
    copy (Apex O2), `_pure` keeps no master copy (O3). fp64 separates rounding from real differences."""
    accumulate: PositiveInt | Auto = 1
    """Number of micro-batches that each rank splits its batch into (gradient accumulation). `auto` is the smallest
    number whose micro-batches fit in the memory of every rank: steps on a copy of the model measure it when the run
    starts, and the run directory records it. BatchNorm computes its statistics per micro-batch."""
    clip_norm: PositiveFloat | Off = "off"
    """Maximum L2 norm of the gradient; longer gradients are scaled down."""
    clip_agc: PositiveFloat | Off = "off"
    """Adaptive gradient clipping (Brock et al. 2021, arXiv 2102.06171), such as 0.01: maximum L2 norm of the gradient
    of each row of a weight, and of each bias, relative to that of its values. The classifier is not clipped."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """If the loss or a gradient is NaN or infinite: `stop` the run at that step, or `skip` the step and count it."""
    compile: Annotated[
        Off | Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
        BeforeValidator(_as_mode),
    ] = "off"
    """Mode of `torch.compile` for the model's training pass; `true` is `default`."""
    capture: Switch = "off"
    """GPU: capture the whole optimizer step, from augmentation on the device to the optimizer, as one CUDA graph and
    replay it, so that the host launches one graph per step. If it cannot be captured, such as on several ranks, a note
    says so."""
    cudnn_benchmark: Switch | Auto = "auto"
    """Let cuDNN time its algorithms and keep the fastest; `auto` is on for GPUs if all batches have the same size."""
    loss: LossSection = CrossEntropyLoss()
    """Training loss. Evaluation always reports cross-entropy, of binary classes for several labels per image."""
    label_threshold: float = Field(0.5, gt=0, lt=1)
    """With several labels per image, probability above which evaluation and `paceline predict` name a class."""
    distill: Distill | Off = "off"
    """Also learn from the predictions of a trained model, the teacher."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Probability that is spread evenly over all classes."""
    class_weights: Annotated[
        Off | Literal["balanced"] | dict[str, PositiveFloat], BeforeValidator(_check_class_weights)
    ] = "off"
    """Class weights in the training loss. `balanced` weighs each class by the inverse of its number of images. A
    mapping gives weights by name, such as `{dog: 3}`, and 1 to all other classes. Weights are scaled to a mean of 1
    over the training images, so only their ratios matter. Evaluation is not weighted."""
    ema: Annotated[Ema | Off, BeforeValidator(as_section)] = "off"
    """Average the weights; `on` uses the defaults below."""
    eval_every: CadenceDuration | Off = "1ep"
    """How often to evaluate. The end of the run is evaluated too, unless this is off."""
    eval_train: Switch = "off"
    """Also evaluate a subset of the training images, as large as the validation set, without augmentation, and report
    the gap in accuracy."""
    accuracy: Switch = "off"
    """Measure top-1 and top-5 accuracy on the training batches: on augmented images, in training mode, and with weights
    that change from batch to batch. The label of a mixed image is the class with the largest weight. No extra forward
    pass is run, and the host waits for the device only when the loss is logged."""
    stop: Stop | Off = "off"
    """Target at which the run stops early."""
    metrics: tuple[Metric, ...] = ()
    """Metrics to report in addition to top-1, top-5, loss, ECE and balanced accuracy: averages over the classes of
    precision, recall and F1; AUROC and AP (average precision), which gather the scores of all images on rank 0; `top3`
    and the like; or [your own](../how-to/extend.md#custom-metrics). `weighted_` weights classes by their images. With
    several labels per image all averages are measured, and top-k, ECE and balanced accuracy are not."""
    monitor: Monitor = "auto"
    """Metric that decides which evaluation is the best, what a plateau schedule sees, and when `patience` ends. `auto`
    is top-1, with several labels per image `ap` (mAP), and the loss for the schedule. `loss`, `ece` and `hamming_loss`
    are minimized."""
    patience: Annotated[PositiveInt | CadenceDuration | Off, BeforeValidator(_as_patience)] = "off"
    """Stop the run after this many evaluations, or at the first one after this much training (`5ep`), without a better
    value of `monitor`."""
    max_time: TimeDuration | Off = "off"
    """Stop the run, with a checkpoint and an evaluation, after this much wall-clock time of all its processes
    together. Resumed with more time, it continues with the same bits."""
    callbacks: tuple[Annotated[OwnCallback, ACCEPT_NAME, NAME_JSON_SCHEMA], ...] = ()
    """Your own classes that rank 0 calls after each step, epoch and evaluation, with a read-only view of training."""

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if (self.epochs == "auto") == (self.steps == "auto"):
            raise ValueError("the length must be given exactly once (set either epochs or steps)")
        if self.clip_agc != "off" and self.clip_norm != "off":
            raise ValueError(f"clip_agc {self.clip_agc:g} and clip_norm {self.clip_norm:g} both clip (set one to off)")
        if isinstance(self.loss, OwnLoss) and self.label_smoothing:
            raise ValueError(f"label_smoothing has no effect with loss {self.loss.name} (set label_smoothing=0)")
        if self.eval_every != "off":
            return self
        for name in NEEDS_EVALUATION:
            if self.is_set(name):
                raise ValueError(f"{name} has no effect with eval_every off (set eval_every=1ep)")
        return self

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a rank's batch. Raise `RecipeError` if they are not measured yet."""
        if self.accumulate == "auto":
            raise RecipeError("train.accumulate: auto is measured only by paceline train (set a number)")
        return self.accumulate

    @property
    def extra_metrics(self) -> tuple[str, ...]:
        """Metrics of `metrics` and `monitor` that not every evaluation has, each once."""
        named = (*self.metrics, *(() if self.monitor == "auto" else (self.monitor,)))
        return tuple(dict.fromkeys(each for each in named if each not in ALWAYS))


# Characters that Weights & Biases refuses in project names (https://docs.wandb.ai/ref/python/init); refused for all
# trackers, so that one name fits all.
_REFUSED_CHARS: Final = "/\\#?%:"


def _check_title(title: str) -> str:
    if not title.isprintable() or not 0 < len(title) <= 128 or set(title) & set(_REFUSED_CHARS):
        raise ValueError(
            f"{title!r} is not a name: 1 to 128 characters without {' '.join(_REFUSED_CHARS)} (write another)"
        )
    return title


Title = Annotated[str, AfterValidator(_check_title)]


class Wandb(Section):
    """Log to Weights & Biases."""

    name: Literal["wandb"] = "wandb"
    project: Title = "paceline"
    """Project of the run."""
    entity: Title = "auto"
    """User or team that owns the project; `auto` is your default entity."""
    mode: Literal["auto", "offline", "online"] = "auto"
    """`auto` follows WANDB_MODE if it is set; otherwise it is online if you are logged in (WANDB_API_KEY or `wandb
    login`), else offline. Offline, nothing leaves the run directory before you run `wandb sync`."""


class Mlflow(Section):
    """Log to MLflow: the server or store in MLFLOW_TRACKING_URI, or files in the run directory."""

    name: Literal["mlflow"] = "mlflow"
    experiment: Title = "paceline"
    """Experiment of the run."""


class Trackio(Section):
    """Log to trackio, which keeps a database per project on this machine."""

    name: Literal["trackio"] = "trackio"
    project: Title = "paceline"
    """Project of the run."""


class OwnSink(PluginSection):
    """Your own sink: `MyTracker(run_dir=..., **args)` returns an object that receives the run's records ([the
    interface](../how-to/extend.md#custom-trackers))."""

    name: ImportPath
    """Module and name of the class or function, such as `mypkg.plugins:MyTracker`."""


SinkSection = Annotated[
    Annotated[Wandb | Mlflow | Trackio | OwnSink, ByName()],
    ACCEPT_NAME,
    NAME_JSON_SCHEMA,
]


class Log(Section):
    """Logs, trackers and the report."""

    added: ClassVar = ("explain", "predictions", "price_per_hour", "quote")

    every: CadenceDuration = "10st"
    """How often to log loss and throughput."""
    tensorboard: Literal["auto", "on", "off"] = "auto"
    """Write TensorBoard events; `auto` does if TensorBoard is installed."""
    sinks: tuple[SinkSection, ...] = ()
    """Experiment trackers to log to, in addition to the run's own files."""
    samples: bool = False
    """Record on each rank the samples of every step, with a checksum of their pixels as the loader delivers them.
    Augmentation on the device comes after that."""
    worst: int = Field(16, ge=0, le=100)
    """Number of misclassified validation images with the highest loss to keep as thumbnails. 0 keeps no images, nor
    those of the first training step."""
    explain: Switch = "on"
    """Draw for these images, at the end of the run, what the model looks at for the predicted and for the true class
    (Grad-CAM, Selvaraju et al. 2017, arXiv 1610.02391; for plain transformers occlusion, Zeiler and Fergus 2014, arXiv
    1311.2901). Drawing stops after 3 % of the training time, but after 0.3 to 5 seconds; the other images have no maps.
    Without effect on `parallel.strategy=fsdp` with several ranks."""
    predictions: Switch = "off"
    """Write `predictions.csv` at the end: the class, the prediction and its probability of each validation image, in
    the last evaluation. Images with several labels have none."""
    report: Switch = "on"
    """Write `report.html` at the end."""
    price_per_hour: PositiveFloat | Off = "off"
    """Price of one rank per hour, in any currency: of a GPU, or of its share of a node. `result.json` then has the
    `cost` of all processes of the run."""
    quote: Off | str = "off"
    """File with the output of `paceline quote --json` for this recipe, to compare with what the run measures."""

    @field_validator("sinks")
    @classmethod
    def _refuse_duplicates(cls, sinks: tuple[SinkSection, ...]) -> tuple[SinkSection, ...]:
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
    """How ranks work together. Their number is not part of a recipe."""

    added: ClassVar = ("bind",)

    strategy: Literal["ddp", "fsdp", "dataparallel"] = "ddp"
    """ddp keeps a replica on every rank, fsdp (FSDP2) shards weights, gradients and optimizer state over the ranks, and
    dataparallel drives all GPUs from one process, for comparison. With a single rank, ddp and fsdp do nothing."""
    bucket_mb: PositiveFloat | Auto = "auto"
    """ddp: MiB of gradients per bucket; `auto` is torch's 25, with a first bucket of 1."""
    bucket_view: bool = True
    """ddp: gradients are views into the buckets, which saves a copy of each."""
    static_graph: bool = False
    """ddp: every step uses the same parameters in the same order."""
    compression: Off | Literal["bf16", "fp16", "powersgd"] = "off"
    """ddp: send gradients in 16 bits, or as low-rank factors (Vogels et al. 2019, arXiv 1905.13727)."""
    sync_gradients: bool = True
    """ddp: average gradients over the ranks. false measures what communication costs: each rank trains alone, and their
    weights diverge. A straggler still delays the others, as the ranks share the mean of their gradient norms in each
    step, and votes on saving and stopping, which the next step waits for. Logged losses stay means over the ranks.
    `model.norm=sync_batch` still communicates."""
    powersgd_rank: PositiveInt | Auto = "auto"
    """Rank of the factors; `auto` is 1."""
    reshard: bool = False
    """fsdp: drop gathered weights after forward and gather them again in backward, which takes less memory and more
    communication."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device type of each rank; `auto` is a GPU if there is one."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective library; `auto` is nccl for GPUs and gloo for CPUs."""
    timeout: TimeDuration = "10min"
    """How long a rank may wait for another, or stay in one stage of a step, before the run fails."""
    check_replicas: CadenceDuration | Off = "off"
    """ddp: how often to compare the ranks' weights by a hash; the run ends if they differ."""
    threads: PositiveInt | Auto = "auto"
    """CPU threads per rank; `auto` shares the node's cores. With another number of threads, results are not bitwise
    identical."""
    bind: Literal["auto", "off", "cores"] = "off"
    """Bind each rank, with its threads and loader workers, to cores of its own, next to its GPU if the kernel reports
    where that is. `auto` does so for several ranks per node, unless a launcher has bound them already or there are
    fewer cores than ranks; `cores` makes it an error if it cannot. It stays within the cores that a batch system or
    container allows. `off` leaves the choice of cores to the kernel."""

    @model_validator(mode="after")
    def _check_strategy(self) -> Self:
        for name, strategy in _ONLY_FOR_STRATEGY.items():
            if self.is_set(name) and self.strategy != strategy:
                raise ValueError(f"{name} has no effect with strategy {self.strategy} (set strategy={strategy})")
        for name in ("check_replicas", "compression", "static_graph"):
            if not self.sync_gradients and self.is_set(name):
                raise ValueError(f"{name} has no effect with sync_gradients false (set sync_gradients=true)")
        if self.powersgd_rank != "auto" and self.compression != "powersgd":
            raise ValueError(
                f"powersgd_rank has no effect with compression {self.compression} (set compression=powersgd)"
            )
        return self
