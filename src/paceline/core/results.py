"""Result types of a run, as they are written to JSON and CSV."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from paceline.core.csv_cells import from_cell, to_cell
from paceline.core.errors import PacelineError
from paceline.core.json_file import MeasuredFloat, ResultModel
from paceline.core.quote_result import QuoteTruth
from paceline.core.statistics import Interval
from paceline.core.units import accuracy, count, milliseconds, number, per_second, seconds, size

SCHEMA_VERSION = 3
Status = Literal["completed", "target_reached", "patience_reached", "time_reached", "diverged", "preempted", "failed"]
FINISHED: Final = frozenset({"completed", "target_reached", "patience_reached", "time_reached", "diverged"})
"""Statuses of a run that ended as its recipe says."""
CPU_STARVED: Final = "cpu-starved"
"""Bottleneck of a run whose cores other processes used: its other measurements are not reliable."""
IMBALANCE_RATIO: Final = 10
"""Ratio of the largest class to the smallest from which top-1 hides the rare classes."""
_SINGLE_LABEL_METRICS: Final = ("top1", "top5", "ece", "mean_class_accuracy")
_CORNER = "true\\predicted"
_COLUMNS = ("class", "images", "correct", "accuracy")
_PREDICTION_COLUMNS = ("predicted", "precision", "f1")
_SCORE_COLUMNS = ("auroc", "ap")
_CALIBRATION_COLUMNS = ("above", "up_to", "images", "correct", "accuracy", "confidence")


@dataclass(frozen=True)
class MisclassifiedImage:
    """Sample `index` of a split, of class `label` and classified as `predicted`.

    `confidence` is the probability of the predicted class, `loss` the cross-entropy of the true one.
    """

    index: int
    label: int
    predicted: int
    confidence: float
    loss: float


@dataclass(frozen=True)
class ImagePrediction:
    """Sample `index` of a split, of class `label` and classified as `predicted` with `probability`, 0 to 1."""

    index: int
    label: int
    predicted: int
    probability: float


@dataclass(frozen=True)
class ClassCount:
    """Number of images of a class, and how many of them were classified correctly.

    `predicted` is the number of images of any class that were classified as this one. `auroc` and `ap` (average
    precision) are of this class against all others, NaN if they are undefined. None: not measured.
    """

    name: str
    images: int
    correct: int
    predicted: int | None = None
    auroc: float | None = None
    ap: float | None = None

    @property
    def accuracy(self) -> float:
        """Share of correctly classified images, 0 to 1: the recall. Only for a class with images."""
        return self.correct / self.images

    @property
    def precision(self) -> float | None:
        """Share of correct ones among the images classified as this class; None without any."""
        return self.correct / self.predicted if self.predicted else None

    @property
    def f1(self) -> float | None:
        """Harmonic mean of precision and recall, 2 TP / (2 TP + FP + FN); None without images."""
        return None if self.predicted is None or not self.images else 2 * self.correct / (self.images + self.predicted)


@dataclass(frozen=True)
class CalibrationBin:
    """Images whose confidence is above `low` and at most `high`: their number, how many were classified correctly, and
    their mean confidence (0 without images)."""

    low: float
    high: float
    images: int
    correct: int
    confidence: float

    @property
    def accuracy(self) -> float:
        """Share of correctly classified images, 0 to 1. Only for a bin with images."""
        return self.correct / self.images


@dataclass(frozen=True)
class ClassTable:
    """Per-class results and calibration of one evaluation."""

    classes: tuple[ClassCount, ...]
    confusion: tuple[tuple[int, ...], ...] = ()  # a row per true class, a column per predicted one; may be left out
    calibration: tuple[CalibrationBin, ...] = ()  # of which the ECE is computed

    @property
    def is_uneven(self) -> bool:
        """Whether the classes are imbalanced (`is_imbalanced`)."""
        return is_imbalanced(each.images for each in self.classes)


def is_imbalanced(counts: Iterable[int]) -> bool:
    """Return whether the largest count exceeds `IMBALANCE_RATIO` times the smallest one above 0."""
    nonempty = [each for each in counts if each]
    return bool(nonempty) and max(nonempty) > IMBALANCE_RATIO * min(nonempty)


def printable_class_name(name: str) -> str:
    """Return `name` with undecodable bytes escaped."""
    # Class names are names of folders, which Linux allows to be any bytes.
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def error_rate_key(each: ClassCount) -> tuple[float, int]:
    """Return a sort key that puts the least accurate class first."""
    # At equal accuracy, more images are stronger evidence.
    return each.accuracy, -each.images


def worst_classes(classes: Iterable[ClassCount], number: int) -> list[ClassCount]:
    """Return up to `number` classes of the lowest accuracy, only those with errors."""
    with_errors = [each for each in classes if each.correct < each.images]
    return sorted(with_errors, key=error_rate_key)[:number]


def classes_csv(table: ClassTable) -> str:
    """Return a CSV table with a row per class, of what was measured; undefined values are empty."""
    rows = [
        [to_cell(each.name), each.images, each.correct, each.accuracy if each.images else ""] for each in table.classes
    ]
    header = [*_COLUMNS]
    for names in (_PREDICTION_COLUMNS, _SCORE_COLUMNS):
        if any(getattr(each, name) is not None for each in table.classes for name in names):
            header += names
            for row, each in zip(rows, table.classes, strict=True):
                row += [_or_empty(getattr(each, name)) for name in names]
    return _to_csv([header, *rows])


def _or_empty(value: float | None) -> float | str:
    return "" if value is None or math.isnan(value) else value


def confusion_csv(table: ClassTable) -> str:
    """Return the confusion matrix as CSV, with class names in the first row and column."""
    names = [to_cell(each.name) for each in table.classes]
    rows = [[name, *row] for name, row in zip(names, table.confusion, strict=True)]
    return _to_csv([[_CORNER, *names], *rows])


def read_classes_csv(text: str) -> tuple[ClassCount, ...]:
    """Parse the output of `classes_csv`. Raise `PacelineError` for anything else."""
    try:
        rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        return tuple(
            ClassCount(
                from_cell(row["class"]),
                int(row["images"]),
                int(row["correct"]),
                int(row["predicted"]) if row.get("predicted") else None,
                *(_parse_share(row[name]) if name in row else None for name in _SCORE_COLUMNS),
            )
            for row in rows
        )
    except (KeyError, TypeError, ValueError, csv.Error):
        raise PacelineError("is not a table of classes") from None


def _parse_share(cell: str) -> float:
    """Return a number from 0 to 1; NaN for an empty cell. Raise `ValueError` for others."""
    value = float(cell) if cell else math.nan
    if value < 0 or value > 1:
        raise ValueError(cell)
    return value


def calibration_csv(table: ClassTable) -> str:
    """Return the calibration bins as CSV; accuracy and confidence are empty for a bin without images."""
    rows = [
        [each.low, each.high, each.images, each.correct, each.accuracy if each.images else "", each.confidence or ""]
        for each in table.calibration
    ]
    return _to_csv([_CALIBRATION_COLUMNS, *rows])


def read_calibration_csv(text: str) -> tuple[CalibrationBin, ...]:
    """Parse the output of `calibration_csv`. Raise `PacelineError` for anything else, such as impossible numbers."""
    try:
        rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        bins = tuple(
            CalibrationBin(
                float(row["above"]),
                float(row["up_to"]),
                int(row["images"]),
                int(row["correct"]),
                float(row["confidence"] or 0),
            )
            for row in rows
        )
        if all(0 <= each.low < each.high <= 1 and 0 <= each.correct <= each.images for each in bins) and all(
            0 <= each.confidence <= 1 for each in bins
        ):
            return bins
    except (KeyError, TypeError, ValueError, csv.Error):
        pass
    raise PacelineError("is not a table of calibration bins") from None


def _to_csv(rows: Iterable[Iterable[object]]) -> str:
    table = io.StringIO(newline="")
    csv.writer(table).writerows(rows)
    return table.getvalue()


class EvalResult(ResultModel):
    """One evaluation: the number of images, and shares and mean loss over them.

    `ece` is the expected calibration error, the mean distance between confidence and accuracy; `mean_class_accuracy` is
    the mean of per-class accuracies. `metrics` has those that the recipe names beyond these, by name (`core.metric`).
    None: not measured. With several labels per image, `loss` is binary cross-entropy, `metrics` has all of
    `core.metric.MULTI_LABEL`, and the others are left out of the JSON: `top1` and `top5` are NaN.
    """

    images: int
    top1: float = math.nan
    top5: float = math.nan
    loss: MeasuredFloat
    ece: MeasuredFloat | None = None
    mean_class_accuracy: float | None = None
    metrics: dict[str, MeasuredFloat] | None = None

    @model_serializer(mode="wrap")
    def _serialize_measured(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        left_out = _SINGLE_LABEL_METRICS if math.isnan(self.top1) else ()
        return {name: each for name, each in values.items() if name not in left_out}

    def to_row(self, mode: Literal["json", "python"] = "json") -> dict[str, Any]:
        """Return all values as one flat mapping, `metrics` by their names."""
        values = self.model_dump(mode=mode)
        metrics = values.pop("metrics")
        return values | (metrics or {})


def describe_accuracy(result: EvalResult) -> str:
    """Return `top-1 97.22 %`, or the loss with several labels per image."""
    return f"loss {result.loss:.4f}" if math.isnan(result.top1) else f"top-1 {accuracy(result.top1)}"


class Finding(ResultModel):
    """A problem of what a run has learned (`core.health`)."""

    name: str
    severity: Literal["error", "warning", "note"]  # error: the weights are unusable
    evidence: str  # a sentence or two
    advice: str
    numbers: dict[str, MeasuredFloat] = Field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name for display."""
        return self.name.replace("_", " ")


class BatchNormCheck(ResultModel):
    """How many of the same training `images` are classified correctly, with `running` or `batch` statistics of
    BatchNorm."""

    images: int
    running: int
    batch: int


class Calibration(ResultModel):
    """A temperature by which to divide logits, and what it changes on `images` validation images.

    `calibrated_loss` and `calibrated_ece` are of two-fold cross-validation, which `temperature`, fitted to all images,
    is not part of.
    """

    temperature: float = Field(gt=0, allow_inf_nan=False)
    images: int
    loss: MeasuredFloat
    ece: MeasuredFloat | None
    calibrated_loss: MeasuredFloat
    calibrated_ece: MeasuredFloat | None


class EvalReport(ResultModel):
    """Evaluations of the weights after a step.

    `val` and `train` (on training images) are of the raw weights, `ema` of the averaged ones. `classes`, `worst` (the
    misclassified images of the highest loss), `health`, `calibration` and `predictions` (on rank 0, if requested) are
    of the `primary` weights, and not part of the JSON.
    """

    val: EvalResult
    ema: EvalResult | None = None
    train: EvalResult | None = None
    classes: ClassTable | None = Field(default=None, exclude=True, repr=False)
    worst: tuple[MisclassifiedImage, ...] = Field(default=(), exclude=True, repr=False)
    health: tuple[Finding, ...] = Field(default=(), exclude=True, repr=False)
    calibration: Calibration | None = Field(default=None, exclude=True, repr=False)
    predictions: tuple[ImagePrediction, ...] = Field(default=(), exclude=True, repr=False)

    @property
    def primary(self) -> EvalResult:
        """`ema` if the weights are averaged, else `val`."""
        return self.val if self.ema is None else self.ema

    @property
    def gap(self) -> float | None:
        """Top-1 of `train` minus that of `val`."""
        gap = math.nan if self.train is None else self.train.top1 - self.val.top1
        return None if math.isnan(gap) else gap


class ThroughputResult(ResultModel):
    """Global images/s in steady state, including waits for data.

    `spread` is the 10th and 90th percentile of images/s over `n` windows of up to ten steps; `excluded_s` is the time
    of warm-up steps and pauses.
    """

    images_per_s: float
    spread: tuple[float, float]
    n: int
    excluded_s: float


class TimeResult(ResultModel):
    """Seconds of the whole run and of its parts.

    `startup_s` runs from the start of the process to the first step, `to_target_s` from there to the end of the
    evaluation that reached the target (None: no target, or not reached).
    """

    wall_s: float
    startup_s: float
    train_s: float
    eval_s: float
    checkpoint_s: float
    to_target_s: float | None


class StageResult(ResultModel):
    """Seconds of one stage over all measured steps, by host and device clock, and its share of wall-clock time."""

    host_s: float
    device_s: float
    share: float


class AccountResult(ResultModel):
    """Breakdown of the wall-clock seconds of rank 0's process; with `residual_s` the parts add up to `wall_s`.

    `start_up_s` precedes the first step, without `compile_s`. `warmup_s` are the first `measure.warmup_steps` steps,
    `stages_s` all stages of the `counted_steps` after them (`RunResult.stages` has each). `pauses` are seconds by name:
    epoch_boundary (starting the loader up to its first batch), evaluate, checkpoint, trace, capture. `finish_s` follows
    the last step (comparing ranks, writing traces, hashing weights), `closing_s` the result (images, trackers,
    disconnecting, report). The summary and the end of the interpreter are not included. `explained` is the share of
    `wall_s` that is not residual.
    """

    wall_s: float
    start_up_s: float
    compile_s: float
    warmup_s: float
    stages_s: float
    counted_steps: int
    pauses: dict[str, float]
    finish_s: float
    closing_s: float = 0.0
    residual_s: float
    explained: float

    def closed(self, wall_s: float) -> Self:
        """Return this account at `wall_s` seconds after the start of the process; the time added is `closing_s`."""
        closing_s = self.closing_s + max(0.0, wall_s - self.wall_s)
        wall_s = max(self.wall_s, wall_s)
        explained = 1 - abs(self.residual_s) / wall_s if wall_s else self.explained
        return self.model_copy(update={"closing_s": closing_s, "wall_s": wall_s, "explained": explained})


class LoaderResult(ResultModel):
    """How the training batches of a rank were made, in seconds summed over workers, which run in parallel with the
    steps.

    `loader` is `inline` if the rank itself made them. `read_s` is reading bytes, `decode_s` decoding and resizing,
    `augment_s` augmentation, `collate_s` stacking and handing over, `wait_s` how long the rank waited. `queue_depth` is
    the mean number of ready batches at a request, `ready` the share of batches without a wait. `bytes_read` come from
    the source, `bytes_made` are pixels passed on. `busy` is the share of time in which workers worked (None without
    workers).
    """

    loader: Literal["inline", "device", "nvjpeg", "native", "threads", "processes"] = "processes"
    workers: int
    batches: int
    images: int
    read_s: float
    decode_s: float
    augment_s: float
    collate_s: float
    wait_s: float
    queue_depth: float
    ready: float
    bytes_read: int
    bytes_made: int
    busy: float | None


class HostToDeviceResult(ResultModel):
    """Transfer of rank 0's batches to its device, as means per step.

    The stage `h2d` has the time that steps wait for it.
    """

    # Images, labels and random numbers for augmentation; 0 if the loader makes batches on the device.
    batch_bytes: float
    copied_bytes: float  # 0 on a CPU, which uses the batch in place
    copy_s: float | None = None  # on the GPU, in parallel with computing; None: not timed
    bytes_per_s: float | None = None

    def __str__(self) -> str:
        """Return `154 MB a step, copied in 13.6 ms: 11.3 GB/s`, or why nothing is copied."""
        if not self.batch_bytes:
            return "nothing: the loader makes batches on the device"
        batch = f"{size(self.batch_bytes)} a step"
        if not self.copied_bytes:
            return f"{batch}, none of it copied: the device is the CPU"
        if self.copy_s is None or self.bytes_per_s is None:
            return f"{batch}, copied in a time that was not measured"
        return f"{batch}, copied in {milliseconds(self.copy_s)}: {number(self.bytes_per_s / 1e9)} GB/s"


class BucketResult(ResultModel):
    """A DDP gradient bucket: bytes sent, and means over `n` steps.

    `ready_s` counts from the step's first ready bucket, `wire_s` from ready to averaged.
    """

    bytes: int
    ready_s: float
    wire_s: float
    n: int


class CommunicationResult(ResultModel):
    """Time of averaging gradients on rank 0, as means in seconds per step.

    `exposed_s` is how long a step waits, from its last ready gradient to all being averaged, including late ranks;
    `share` is that of the step. `bytes`, `wire_s` (first bucket ready to last averaged), `overlap` (the share of
    `wire_s` hidden by backward) and `buckets` need `measure.communication=on`.
    """

    exposed_s: float
    share: float
    bytes: int | None = None
    wire_s: float | None = None
    overlap: float | None = None
    buckets: tuple[BucketResult, ...] = ()


class RankResult(ResultModel):
    """Mean times of a rank over the measured steps, in seconds per step; those of `stages` are device seconds.

    `late_s` is how much longer the others waited for gradients and buffers than this rank; 0 if unknown.
    """

    rank: int
    step_s: float
    late_s: float
    stages: dict[str, float]


class StragglerResult(ResultModel):
    """Time lost by waiting for the latest rank: seconds per step, and their share of the step.

    `late_steps` is the share of steps in which some rank was late by at least 5 % of a step; it is small after one long
    stall. `rank` is repeatedly late, by `late_s` seconds, and spends more time than the others in `stage`; None and 0
    without such a rank.
    """

    lost_s: float
    share: float
    rank: int | None = None
    stage: str | None = None
    late_s: float = 0.0
    late_steps: float = 0.0


class CpuResult(ResultModel):
    """CPU time over the measured steps, of the rank that lost the largest share to other processes.

    Times are sums over the threads of the rank and of its loader workers.
    """

    rank: int
    cores: int  # which all `ranks` share
    ranks: int
    threads: int  # per rank
    wall_s: float
    run_s: float
    waited_s: float  # runnable without a core
    lost_s: float  # of the waiting: due to other processes, or a hypervisor
    share: float  # `lost_s` over `lost_s` and `run_s`
    own_share: float  # the rest of the waiting over itself and `run_s`
    throttled_share: float  # time stopped by a CPU quota, over that and the time used
    others_cores: float  # mean number of the cores that other processes kept busy
    pressure: float  # share of time in which anything on the node waited for a CPU (PSI)
    switches: int  # involuntary context switches


class MemoryResult(ResultModel):
    """Peak memory of rank 0 in bytes: of the host (resident set of the process without workers), and of its GPU, if
    any."""

    host_bytes: int
    device_bytes: int | None = None


class CheckpointResult(ResultModel):
    """Numbers of saved and failed checkpoints; seconds and bytes are means per checkpoint.

    `stall_s` is how long training stopped, `write_s` the time until the checkpoint was on disk.
    """

    saved: int
    failed: int
    stall_s: float
    write_s: float
    bytes: int


class GoodputResult(ResultModel):
    """Breakdown of the wall-clock seconds since the first start of the run, over all its processes.

    `useful_s` is the time of steps whose work is in the result; `share` is that of `wall_s`. `rework_s` is the time of
    steps that were lost with a process and repeated, `down_s` the time between processes (detection, queue, restart),
    `starts` the number of processes of rank 0.
    """

    share: float
    wall_s: float
    useful_s: float
    startup_s: float
    data_wait_s: float
    eval_s: float
    checkpoint_s: float
    rework_s: float
    down_s: float
    other_s: float
    starts: int


class TimeForecast(ResultModel):
    """Predicted seconds from a step to the result of a run, with a 95 % interval, and what they consist of.

    `steps` of `step_s` seconds each, `evaluations` of `eval_s` and `checkpoints` of `checkpoint_s`, and the end.
    """

    predicted_s: float
    low_s: float
    high_s: float
    steps: int
    step_s: float
    evaluations: int
    eval_s: float
    checkpoints: int
    checkpoint_s: float


class EstimateResult(ResultModel):
    """The time that a run predicted after `step` steps and `made_s` seconds of training.

    `memory_bytes` is the peak memory of the ranks of rank 0's node with their loader workers, of `memory_total_bytes`
    that they may use; of the GPU of rank 0 if it has one. `actual_s` is the time that the rest of the run took, and
    `error` is `forecast.predicted_s` over it, minus 1.
    """

    step: int
    made_s: float
    forecast: TimeForecast
    memory_bytes: int
    memory_total_bytes: int
    actual_s: float | None = None
    error: float | None = None

    @property
    def is_within(self) -> bool | None:
        """Whether the time that the run took is in the interval; None before the end."""
        return None if self.actual_s is None else self.forecast.low_s <= self.actual_s <= self.forecast.high_s

    def ended(self, trained_s: float) -> Self:
        """Return the estimate of a run that was complete after `trained_s` seconds of training."""
        actual_s = trained_s - self.made_s
        error = self.forecast.predicted_s / actual_s - 1 if actual_s > 0 else None
        return self.model_copy(update={"actual_s": actual_s, "error": error})


class EnergyResult(ResultModel):
    """Energy in kWh over all nodes and processes of a run, from the start of training to its end; None: not measured.

    `gpu_kwh` is of the GPUs that the ranks use, `cpu_kwh` of all CPU packages of their nodes and, where it is counted
    apart, their memory: including idle power and other programs. Nothing is estimated. `images_per_kwh` is the images
    trained on per kWh of all that was measured. `source` names the counters, `missing` says by `gpu` or `cpu` why there
    is none.
    """

    gpu_kwh: float | None
    cpu_kwh: float | None
    images_per_kwh: float | None
    source: str
    missing: dict[str, str]

    @property
    def kwh(self) -> float | None:
        """The sum of all that was measured; None if nothing was."""
        known = [each for each in (self.gpu_kwh, self.cpu_kwh) if each is not None]
        return sum(known) if known else None


class RunResult(ResultModel):
    """The result of a run.

    `eval` is the last evaluation, `ema` that of the averaged weights, `train_eval` that on training images (None: off
    in the recipe), and `gap` top-1 of `train_eval` minus that of `eval`. `best` is the best evaluation of the averaged
    weights if there are any, else of the raw ones, after `best_step` steps and `best_epoch` epochs, by the metric
    `monitor`, which `is_monitor_minimized` or not. `skipped_steps` had a NaN or infinite loss or gradient. `bad_images`
    counts distinct images that could not be read. `trained_parameters` are those not frozen. `loader` and
    `host_to_device` are None with `measure.clock=off`, `communication` also without DDP's averaging, and `straggler`
    likewise and on one rank, for which `ranks` is empty. `cpu` is None if the kernel does not report how long threads
    wait. `health` has the findings, the worst first (None on other ranks). `verdict` has `bottleneck`, `evidence`,
    `ceiling` and `try`. `provenance` records hardware, versions and how the run was started; in a batch job also
    `job_id`, and `job_restarts`, its requeues (SLURM_RESTART_COUNT). `estimate` is the time that the run predicted for
    itself, compared with the truth; None for a run that was too short, resumed or ended before its last step, whose
    planned rest was never run. `forecast` is the time of the whole training as known at the end of a run that
    `train.max_time` ended. `quote` compares the quote of `log.quote` with the run. `energy` is None with
    `measure.telemetry=off`, and `cost`, rank-hours of all processes times `log.price_per_hour` in its currency, without
    a price. `run_dir` is set by `paceline.train`. Other fields are None in results from before they were recorded.
    """

    schema_version: int = SCHEMA_VERSION
    status: Status
    recipe_hash: str
    parameters: int | None = None
    trained_parameters: int | None = None
    world_size: int
    epochs: float
    steps: int
    images_seen: int
    skipped_steps: int = 0
    bad_images: int = 0
    eval: EvalResult | None
    ema: EvalResult | None = None
    train_eval: EvalResult | None = None
    gap: float | None = None
    best: EvalResult | None
    best_step: int | None = None
    best_epoch: float | None = None
    monitor: str | None = None
    is_monitor_minimized: bool | None = None
    throughput: ThroughputResult
    time: TimeResult
    estimate: EstimateResult | None = None
    forecast: EstimateResult | None = None
    quote: QuoteTruth | None = None
    goodput: GoodputResult | None = None
    checkpoints: CheckpointResult | None = None
    stages: dict[str, StageResult]
    account: AccountResult | None = None
    memory: MemoryResult | None = None
    cpu: CpuResult | None = None
    loader: LoaderResult | None = None
    communication: CommunicationResult | None = None
    host_to_device: HostToDeviceResult | None = None
    ranks: tuple[RankResult, ...] = ()
    straggler: StragglerResult | None = None
    health: tuple[Finding, ...] | None = None
    energy: EnergyResult | None = None
    cost: float | None = None
    verdict: dict[str, str]
    lr: str
    weights_sha256: str
    provenance: dict[str, Any]
    run_dir: Path | None = Field(default=None, exclude=True)

    @property
    def images_per_s(self) -> float | None:
        """Images/s in steady state (`throughput`); None if no step was counted."""
        return self.throughput.images_per_s if self.throughput.n else None  # the JSON has 0

    @property
    def epoch_images(self) -> float | None:
        """Images per epoch as trained; None without a step."""
        return self.images_seen / self.epochs if self.epochs > 0 else None

    @property
    def starved(self) -> float | None:
        """Share of time that other processes took from a CPU-starved run, else None."""
        return self.cpu.share if self.cpu is not None and self.verdict.get("bottleneck") == CPU_STARVED else None

    def how_it_ended(self, total_steps: int | None = None) -> str:
        """Return the status for display, such as `stopped (SIGTERM) at step 85 of 180`."""
        of_all = "" if total_steps is None else f" of {total_steps:,}"
        match self.status:
            case "preempted":
                by = self.provenance.get("stopped_by")
                return f"stopped{f' ({by})' if isinstance(by, str) else ''} at step {self.steps:,}{of_all}"
            case "failed":
                return f"failed: the weights of the last step, {self.steps:,}, could not be saved"
        return self.status.replace("_", " ")

    def _repr_html_(self) -> str:
        """Return a table for a notebook, with a link to the report."""
        from html import escape

        last = self.ema or self.eval
        rows = {
            "status": self.how_it_ended(),
            "last evaluation": "none" if last is None else describe_accuracy(last),
            "images/s": per_second(self.throughput.images_per_s) if self.throughput.n else "not measured",
            "time": seconds(self.time.wall_s),
            "run directory": str(self.run_dir or ""),
        }
        cells = "".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in rows.items() if text)
        report = self.run_dir / "report.html" if self.run_dir is not None else None
        if report is not None and report.is_file():
            link = escape(report.resolve().as_uri())
            cells += f'<tr><th>report</th><td><a href="{link}">{escape(str(report))}</a></td></tr>'
        return f"<table>{cells}</table>"

    def of(self, run_dir: Path) -> Self:
        """Return this result with its `run_dir`."""
        # Not part of the JSON, as a run directory can be moved.
        return self.model_copy(update={"run_dir": run_dir})


def epoch_seconds(results: Iterable[RunResult], images_per_s: Interval | None) -> float | None:
    """Return the seconds of an epoch at a speed, for `results` of one setting; None if unknown."""
    images = next((found for result in results if (found := result.epoch_images) is not None), None)
    return None if images is None or images_per_s is None else images / images_per_s.value


def stage_seconds(result: RunResult, stage: str) -> float:
    """Return the device seconds of a stage per measured step on rank 0; 0 if no step was measured."""
    steps = result.account.counted_steps if result.account is not None else 0
    return result.stages[stage].device_s / steps if steps and stage in result.stages else 0.0


def throughput_spread(results: Sequence[RunResult]) -> tuple[float, float]:
    """Return the lowest and highest images/s of at least one run; the spread of a single run is that of its windows."""
    if len(results) == 1:
        return results[0].throughput.spread
    rates = [result.throughput.images_per_s for result in results]
    return min(rates), max(rates)


def starved_note(results: Iterable[RunResult]) -> str:
    """Return how many runs were CPU-starved and by how much, as part of a sentence, or ""."""
    runs = list(results)
    shares = [run.starved for run in runs if run.starved is not None]
    if not shares:
        return ""
    of_runs = "" if len(runs) == 1 else f" in {len(shares)} of {count(len(runs), 'run')}"
    up_to = " up to" if len(shares) > 1 else ""
    return f"other processes held the cores{up_to} {100 * max(shares):.0f} % of the time{of_runs}"
