"""Result types: what a run measured and evaluated, as it is written to JSON and CSV."""

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field

from paceline.core.csv_cells import from_cell, to_cell
from paceline.core.errors import PacelineError
from paceline.core.result_model import MeasuredFloat, ResultModel
from paceline.core.statistics import Interval
from paceline.core.units import count, milliseconds, number, size


@dataclass(frozen=True)
class MisclassifiedImage:
    """Sample `index` of a split: its class is `label`, and the model chose `predicted`.

    `confidence` is the model's probability of the predicted class, `loss` the cross-entropy of the true one.
    """

    index: int
    label: int
    predicted: int
    confidence: float
    loss: float


IMBALANCE_RATIO: Final = 10
"""Ratio of the largest class to the smallest from which accuracy hides the rare classes."""
_CORNER = "true\\predicted"
_COLUMNS = ("class", "images", "correct", "accuracy")


@dataclass(frozen=True)
class ClassCount:
    """Images of a class, and how many of them were classified correctly."""

    name: str
    images: int
    correct: int

    @property
    def accuracy(self) -> float:
        """Share of correctly classified images, 0 to 1. Only for a class with images."""
        return self.correct / self.images


@dataclass(frozen=True)
class ClassTable:
    """Per-class results of one evaluation.

    `confusion` has a row per true class and a column per predicted class; it is empty if there are too many classes.
    """

    classes: tuple[ClassCount, ...]
    confusion: tuple[tuple[int, ...], ...] = ()

    @property
    def is_uneven(self) -> bool:
        """Whether some class has more than `IMBALANCE_RATIO` times the images of another; classes without images are
        ignored.
        """
        return is_imbalanced(each.images for each in self.classes)


def is_imbalanced(counts: Iterable[int]) -> bool:
    """Return whether the largest of `counts` exceeds `IMBALANCE_RATIO` times the smallest one that is not 0."""
    some = [each for each in counts if each]
    return bool(some) and max(some) > IMBALANCE_RATIO * min(some)


def printable_class_name(name: str) -> str:
    """Return `name` with undecodable bytes escaped, so that any file and terminal accepts it."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def error_rate_key(each: ClassCount) -> tuple[float, int]:
    """Return a sort key, worst class first: by accuracy, and for equal accuracy by more images, which is stronger
    evidence.
    """
    return each.accuracy, -each.images


def worst_classes(classes: Iterable[ClassCount], number: int) -> list[ClassCount]:
    """Return up to `number` classes of the lowest accuracy, without classes that have no error."""
    mistaken = [each for each in classes if each.correct < each.images]
    return sorted(mistaken, key=error_rate_key)[:number]


def classes_csv(table: ClassTable) -> str:
    """Return a CSV table with a row per class; the accuracy of a class without images is empty."""
    rows = [
        [to_cell(each.name), each.images, each.correct, each.accuracy if each.images else ""] for each in table.classes
    ]
    return _to_csv([_COLUMNS, *rows])


def confusion_csv(table: ClassTable) -> str:
    """Return the confusion matrix as CSV, a row per true class, with class names on top and on the left."""
    names = [to_cell(each.name) for each in table.classes]
    rows = [[name, *row] for name, row in zip(names, table.confusion, strict=True)]
    return _to_csv([[_CORNER, *names], *rows])


def read_classes_csv(text: str) -> tuple[ClassCount, ...]:
    """Parse the output of `classes_csv`. Raise `PacelineError` for anything else."""
    try:
        rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        return tuple(ClassCount(from_cell(row["class"]), int(row["images"]), int(row["correct"])) for row in rows)
    except (KeyError, TypeError, ValueError, csv.Error):
        raise PacelineError("is not a table of classes") from None


def _to_csv(rows: Iterable[Iterable[object]]) -> str:
    table = io.StringIO(newline="")
    csv.writer(table).writerows(rows)
    return table.getvalue()


SCHEMA_VERSION = 3
Status = Literal["completed", "target_reached", "preempted", "failed"]
CPU_STARVED: Final = "cpu-starved"
"""Bottleneck of a run whose cores other processes used: nothing else that was measured of it is reliable."""


class EvalResult(ResultModel):
    """One evaluation: the number of images, and shares and mean loss over exactly these.

    `ece` is the expected calibration error, the mean distance between confidence and accuracy; `mean_class_accuracy` is
    the mean of per-class accuracies. Both are None if they were not measured.
    """

    images: int
    top1: float
    top5: float
    loss: MeasuredFloat
    ece: MeasuredFloat | None = None
    mean_class_accuracy: float | None = None


class Finding(ResultModel):
    """A problem of what a run has learned: `evidence` in a sentence or two with its `numbers`, and `advice`.

    `severity`: `error` if the weights are unusable as they are, `warning` if something was lost, `note` if a figure
    needs an explanation. `core.health` has the names and the rules.
    """

    name: str
    severity: Literal["error", "warning", "note"]
    evidence: str
    advice: str
    numbers: dict[str, MeasuredFloat] = Field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name for display."""
        return self.name.replace("_", " ")


class BatchNormCheck(ResultModel):
    """How many of the same training `images` are classified correctly with two kinds of BatchNorm statistics.

    `running`: with the running statistics, as in evaluation. `batch`: with those of the batches, as in training.
    """

    images: int
    running: int
    batch: int


class EvalReport(ResultModel):
    """Evaluations of the weights after a step: raw, averaged, and on training images.

    `val` and `train` are of the raw weights, `ema` of the averaged ones on the validation split. `classes`, `worst`
    (the misclassified images of the highest loss) and `health` (problems) are of the `primary` weights, and not part of
    the JSON.
    """

    val: EvalResult
    ema: EvalResult | None = None
    train: EvalResult | None = None
    classes: ClassTable | None = Field(default=None, exclude=True, repr=False)
    worst: tuple[MisclassifiedImage, ...] = Field(default=(), exclude=True, repr=False)
    health: tuple[Finding, ...] = Field(default=(), exclude=True, repr=False)

    @property
    def primary(self) -> EvalResult:
        """The evaluation of the averaged weights if there are any, else of the raw ones."""
        return self.val if self.ema is None else self.ema

    @property
    def gap(self) -> float | None:
        """Top-1 on training images minus top-1 on validation images, both of the raw weights."""
        return None if self.train is None else self.train.top1 - self.val.top1


class ThroughputResult(ResultModel):
    """Global images/s in steady state, waiting for data included.

    `spread` is the 10th and 90th percentile of images/s over `n` windows of up to ten steps; `excluded_s` is the time
    of warm-up steps and pauses, which is left out.
    """

    images_per_s: float
    spread: tuple[float, float]
    n: int
    excluded_s: float


class TimeResult(ResultModel):
    """Seconds of the whole run and of its parts. `to_target_s` is None if no target was set or reached.

    `startup_s` runs from the start of the process to the first step, `to_target_s` from there to the end of the
    evaluation that reached the target.
    """

    wall_s: float
    startup_s: float
    train_s: float
    eval_s: float
    checkpoint_s: float
    to_target_s: float | None


class StageResult(ResultModel):
    """Seconds of one stage over all counted steps, by host and device clock, and its share of the wall clock."""

    host_s: float
    device_s: float
    share: float


class AccountResult(ResultModel):
    """Where each second of rank 0's process went: with the unattributed `residual_s` the parts add up to `wall_s`.

    `start_up_s` precedes the first step, without `compile_s`; `warmup_s` are the first `measure.warmup_steps` steps;
    `stages_s` all stages of the `counted_steps` that follow (`RunResult.stages` has each); `pauses` are seconds by
    name: epoch_boundary (a loader starts, and its first batch), evaluate, checkpoint, trace, capture; `finish_s`
    follows the last step: comparing ranks, writing traces, gathering and hashing the weights; `closing_s` follows the
    result: images, trackers, disconnecting from other ranks, the report. It ends when the result is last written:
    printing the summary and ending the interpreter are not included. `explained` is the share of `wall_s` that is not
    residual.
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
        """Return this account at `wall_s` seconds after the start of the process; the additional time is closing."""
        closing_s = self.closing_s + max(0.0, wall_s - self.wall_s)
        wall_s = max(self.wall_s, wall_s)
        explained = 1 - abs(self.residual_s) / wall_s if wall_s else self.explained
        return self.model_copy(update={"closing_s": closing_s, "wall_s": wall_s, "explained": explained})


class LoaderResult(ResultModel):
    """How a rank's training batches were made, in seconds of all workers. They run beside the steps and are not part of
    their sum.

    `loader` made them: device, nvjpeg, native, threads, processes, or inline for the rank itself. `read_s` is reading
    bytes, `decode_s` decoding and resizing, `augment_s` augmenting whole batches, `collate_s` stacking and handing
    over. `wait_s` is how long the rank waited. `queue_depth` is the mean number of ready batches when one was
    requested, `ready` the share of batches without a wait. `bytes_read` come from the source, `bytes_made` are the
    pixels passed on. `busy` is the share of the workers' time in which they worked (None without workers).
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

    `batch_bytes` come from host memory: images as bytes, labels, and random numbers for augmentation on the device; 0
    if the loader makes batches on the device. `copied_bytes` of them are copied to another memory, none on a CPU.
    `copy_s` is the time on the GPU, in parallel with computing, and `bytes_per_s` the rate; None if no copy was timed.
    The time that a step waits for it is the stage `h2d`.
    """

    batch_bytes: float
    copied_bytes: float
    copy_s: float | None = None
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
    """A gradient bucket: bytes sent, and means over `n` steps.

    `ready_s` counts from the first ready bucket of the step, `wire_s` from ready to averaged.
    """

    bytes: int
    ready_s: float
    wire_s: float
    n: int


class CommunicationResult(ResultModel):
    """Time of averaging gradients on rank 0, in seconds per step (means).

    `exposed_s` is what a step waits: from the rank's last ready gradient to all being averaged, including late ranks;
    `share` is that of the step. `bytes`, `wire_s` (first bucket ready to last one averaged), `overlap` (the share of
    `wire_s` hidden by backward) and `buckets` need `measure.communication=on`.
    """

    exposed_s: float
    share: float
    bytes: int | None = None
    wire_s: float | None = None
    overlap: float | None = None
    buckets: tuple[BucketResult, ...] = ()


class RankResult(ResultModel):
    """Means of a rank over the counted steps, in seconds per step; stages are in device seconds.

    `late_s` is how much longer the others waited for gradients and buffers than this rank; 0 if unknown.
    """

    rank: int
    step_s: float
    late_s: float
    stages: dict[str, float]


class StragglerResult(ResultModel):
    """Time that ranks lose by waiting for the latest: seconds per step, and their share of the step.

    `late_steps` is the share of steps in which some rank was late by at least 5 % of a step; it is small if one long
    stall caused the loss. `rank` is a rank that is late repeatedly, by `late_s` seconds, and `stage` where it spends
    more than the others; None and 0 if no single rank is.
    """

    lost_s: float
    share: float
    rank: int | None = None
    stage: str | None = None
    late_s: float = 0.0
    late_steps: float = 0.0


class CpuResult(ResultModel):
    """CPU time of a rank over the counted steps: of the rank that lost the largest share to other processes.

    `run_s` is how long its threads and those of its loader workers ran, `waited_s` how long they were runnable and
    waited for a core, both summed over threads. `lost_s` of that is due to other processes (and a hypervisor), the rest
    to the run itself; `share` is `lost_s` over that and `run_s`, `own_share` likewise. `throttled_share` is the time
    stopped by a CPU quota, over that and the time used. Other processes kept `others_cores` of its `cores` busy on
    average. `pressure` is the share of time in which anything on the node waited for a CPU (PSI), `switches` counts
    involuntary context switches of the rank. `ranks` share these cores, and each computes with `threads`.
    """

    rank: int
    cores: int
    ranks: int
    threads: int
    wall_s: float
    run_s: float
    waited_s: float
    lost_s: float
    share: float
    own_share: float
    throttled_share: float
    others_cores: float
    pressure: float
    switches: int


class MemoryResult(ResultModel):
    """Peak memory of rank 0 in bytes: of the host, and of its GPU (None without one).

    `host_bytes` is the resident set of the process, including touched mapped files, without its workers.
    """

    host_bytes: int
    device_bytes: int | None = None


class CheckpointResult(ResultModel):
    """Checkpoints of this process: saved and failed ones; seconds and bytes are means per checkpoint.

    `stall_s` is how long training stopped, `write_s` how long until the checkpoint was safe on disk.
    """

    saved: int
    failed: int
    stall_s: float
    write_s: float
    bytes: int


class GoodputResult(ResultModel):
    """Where the wall clock went since the first start of the run, over all its processes: seconds that add up.

    `useful_s` is the time of steps whose work is in the result, each counted once; `share` is that of `wall_s`.
    `rework_s` is the time of steps that were lost with a process and repeated, `down_s` the time between processes
    (detection, queue, restart), `starts` the number of processes of rank 0.
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


class RunResult(ResultModel):
    """The result of a run.

    `eval` is the last evaluation, `ema` that of the averaged weights and `train_eval` that on training images; None if
    the recipe asks for none. `gap` is top-1 of `train_eval` minus that of `eval`. `best` is the best evaluation of the
    averaged weights if there are any, else of the raw ones, after `best_step` steps and `best_epoch` epochs.
    `skipped_steps` changed nothing, as their loss or gradient was NaN or infinite. `bad_images` counts distinct images
    that could not be read and were skipped. `trained_parameters` are those not frozen. `parameters`,
    `trained_parameters`, `best_step`, `best_epoch`, `goodput`, `checkpoints`, `account`, `memory` and `cpu` are None in
    results from before they were recorded, and `cpu` also if the kernel does not report how long threads wait; `loader`
    and `host_to_device` are None with `measure.clock=off`, `communication` also if gradients are not averaged by ddp,
    and `straggler` likewise and on one rank, for which `ranks` is empty. `health` lists problems of what was learned,
    the worst first; None on ranks other than 0 and in older results. `verdict` has `bottleneck`, `evidence`, `ceiling`
    and `try`. `provenance` records hardware, versions and how the run was started; in a batch job also `job_id`, and
    `job_restarts`, its requeues (SLURM_RESTART_COUNT). `run_dir` is set on what `paceline.train` returns.
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
    throughput: ThroughputResult
    time: TimeResult
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
    verdict: dict[str, str]
    lr: str
    weights_sha256: str
    provenance: dict[str, Any]
    run_dir: Path | None = Field(default=None, exclude=True)

    @property
    def images_per_s(self) -> float | None:
        """Images/s in steady state (`throughput`); None if no step was counted, which the JSON has as 0."""
        return self.throughput.images_per_s if self.throughput.n else None

    @property
    def epoch_images(self) -> float | None:
        """Images per epoch as trained; None without a step."""
        return self.images_seen / self.epochs if self.epochs > 0 else None

    @property
    def starved(self) -> float | None:
        """Share of time that other processes took from a CPU-starved run; None for other runs."""
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

    def of(self, run_dir: Path) -> Self:
        """Return this result with its `run_dir`, which is not part of the JSON because runs can be moved."""
        return self.model_copy(update={"run_dir": run_dir})


def epoch_seconds(results: Iterable[RunResult], images_per_s: Interval | None) -> float | None:
    """Return the seconds of an epoch at a speed, by the epoch of these runs of one setting; None if either is
    unknown."""
    images = next((found for result in results if (found := result.epoch_images) is not None), None)
    return None if images is None or images_per_s is None else images / images_per_s.value


def starved_note(results: Iterable[RunResult]) -> str:
    """Return how many runs were CPU-starved and by how much at most, as part of a sentence, or ""."""
    runs = list(results)
    shares = [run.starved for run in runs if run.starved is not None]
    if not shares:
        return ""
    of_runs = "" if len(runs) == 1 else f" in {len(shares)} of {count(len(runs), 'run')}"
    up_to = " up to" if len(shares) > 1 else ""
    return f"other processes held the cores{up_to} {100 * max(shares):.0f} % of the time{of_runs}"
