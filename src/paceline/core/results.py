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
    """Sample `index` of a split, of class `label`, which a model took for class `predicted`.

    `confidence` is the model's share for the predicted class, 0 to 1, and `loss` the cross-entropy of the true one.
    """

    index: int
    label: int
    predicted: int
    confidence: float
    loss: float


IMBALANCE_RATIO: Final = 10
"""How many times the images of the rarest class the most frequent one may have before accuracy hides the rare ones."""
_CORNER = "true\\predicted"
_COLUMNS = ("class", "images", "correct", "accuracy")


@dataclass(frozen=True)
class ClassCount:
    """A class: how many images it has, and how many of them were recognised."""

    name: str
    images: int
    correct: int

    @property
    def accuracy(self) -> float:
        """Share of the class's images that were recognised, 0 to 1. Only for a class that has images."""
        return self.correct / self.images


@dataclass(frozen=True)
class ClassTable:
    """One evaluation, class by class.

    `confusion` has a row for each true class and a column for each predicted one; it is empty where there are too
    many classes for such a table.
    """

    classes: tuple[ClassCount, ...]
    confusion: tuple[tuple[int, ...], ...] = ()

    @property
    def is_uneven(self) -> bool:
        """Whether some class has more than `IMBALANCE_RATIO` times the images of another;

        Those without images do not count.
        """
        return is_imbalanced(each.images for each in self.classes)


def is_imbalanced(counts: Iterable[int]) -> bool:
    """Return whether the largest of `counts` is more than `IMBALANCE_RATIO` times the smallest one that is not 0."""
    some = [each for each in counts if each]
    return bool(some) and max(some) > IMBALANCE_RATIO * min(some)


def printable_class_name(name: str) -> str:
    """Return `name` with undecodable bytes of a folder's name written out, so that any file and terminal takes it."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def error_rate_key(each: ClassCount) -> tuple[float, int]:
    """Return what sorts classes the worst first: by accuracy, and of equals that of more images, which says more."""
    return each.accuracy, -each.images


def worst_classes(classes: Iterable[ClassCount], number: int) -> list[ClassCount]:
    """Return up to `number` classes of the lowest accuracy, as `error_rate_key` orders them;

    None that has no mistake.
    """
    mistaken = [each for each in classes if each.correct < each.images]
    return sorted(mistaken, key=error_rate_key)[:number]


def classes_csv(table: ClassTable) -> str:
    """Return a row a class; the accuracy of a class without images is left empty."""
    rows = [
        [to_cell(each.name), each.images, each.correct, each.accuracy if each.images else ""] for each in table.classes
    ]
    return _to_csv([_COLUMNS, *rows])


def confusion_csv(table: ClassTable) -> str:
    """Return the confusion matrix, a row a true class, with the names of the classes on top and on the left."""
    names = [to_cell(each.name) for each in table.classes]
    rows = [[name, *row] for name, row in zip(names, table.confusion, strict=True)]
    return _to_csv([[_CORNER, *names], *rows])


def read_classes_csv(text: str) -> tuple[ClassCount, ...]:
    """Return what `classes_csv` wrote. Raise `PacelineError` for anything else."""
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
"""The bottleneck of a run whose cores other processes held: nothing else that was measured of it can be relied on."""


class EvalResult(ResultModel):
    """An evaluation: how many images were counted, and the shares and mean loss over exactly those.

    `ece` is the expected calibration error, the mean distance between confidence and accuracy;
    `mean_class_accuracy` is the mean of the classes' own accuracies. Both are None where they were not measured.
    """

    images: int
    top1: float
    top5: float
    loss: MeasuredFloat
    ece: MeasuredFloat | None = None
    mean_class_accuracy: float | None = None


class Finding(ResultModel):
    """Something wrong with what a run has learnt: `evidence` in a sentence or two with its `numbers`, and `advice`.

    `severity` is `error` where the weights are of no use as they are, `warning` where something was lost, and `note`
    where a figure needs an explanation. `core.health` has the names and the rules.
    """

    name: str
    severity: Literal["error", "warning", "note"]
    evidence: str
    advice: str
    numbers: dict[str, MeasuredFloat] = Field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name as people read it."""
        return self.name.replace("_", " ")


class BatchNormCheck(ResultModel):
    """Of the same training `images`, how many are classified correctly with two kinds of batch-norm statistics.

    `running` is with the running statistics, as in every evaluation, `batch` with those of the batches themselves, as
    in training.
    """

    images: int
    running: int
    batch: int


class EvalReport(ResultModel):
    """What the weights after a step are worth: as they are, averaged, and on images they were trained on.

    `val` and `train` are of the weights as they are, `ema` of the averaged ones on the validation split. `classes`
    and `worst`, the misclassified images of the highest loss, are of the judged weights, as is `health`, what is wrong
    with them; they are not part of the JSON.
    """

    val: EvalResult
    ema: EvalResult | None = None
    train: EvalResult | None = None
    classes: ClassTable | None = Field(default=None, exclude=True, repr=False)
    worst: tuple[MisclassifiedImage, ...] = Field(default=(), exclude=True, repr=False)
    health: tuple[Finding, ...] = Field(default=(), exclude=True, repr=False)

    @property
    def primary(self) -> EvalResult:
        """The evaluation that decides: of the averaged weights when there are any."""
        return self.val if self.ema is None else self.ema

    @property
    def gap(self) -> float | None:
        """Top-1 on training images less that on validation images, both of the weights as they are."""
        return None if self.train is None else self.train.top1 - self.val.top1


class ThroughputResult(ResultModel):
    """Global images/s in steady state, waiting for data included.

    `spread` is the 10th and 90th percentile of images/s over `n` windows of up to ten steps; `excluded_s` is what
    was left out: warm-up steps and pauses.
    """

    images_per_s: float
    spread: tuple[float, float]
    n: int
    excluded_s: float


class TimeResult(ResultModel):
    """Seconds: the whole run, and its parts. `to_target_s` is None when no target was set or reached.

    `startup_s` runs from the start of the process to the first step; `to_target_s` from there to the end of the
    evaluation that met the target.
    """

    wall_s: float
    startup_s: float
    train_s: float
    eval_s: float
    checkpoint_s: float
    to_target_s: float | None


class StageResult(ResultModel):
    """Seconds of one stage over all counted steps, by the host's clock and the device's; share of the wall clock."""

    host_s: float
    device_s: float
    share: float


class AccountResult(ResultModel):
    """Where each second of rank 0's process went: with `residual_s`, which nothing covers, they add up to `wall_s`.

    `start_up_s` is what precedes the first step, but for `compile_s`, compiling; `warmup_s` the first steps, as many as
    `measure.warmup_steps`; `stages_s` all stages of the `counted_steps` that follow (`RunResult.stages` has each);
    `pauses` has seconds by name: epoch_boundary (a loader starts, and its first batch), evaluate, checkpoint,
    trace, capture;
    `finish_s` is what follows the last step: comparing ranks, writing traces, gathering and hashing the weights;
    `closing_s` what follows the result: pictures, trackers, parting from the other ranks, the report. It ends when the
    result is written for the last time: printing the summary and ending the interpreter are in no part.
    `explained` is the share of `wall_s` that is not residual.
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
        """Return the account of the same process `wall_s` seconds after its start: what came after it is closing."""
        closing_s = self.closing_s + max(0.0, wall_s - self.wall_s)
        wall_s = max(self.wall_s, wall_s)
        explained = 1 - abs(self.residual_s) / wall_s if wall_s else self.explained
        return self.model_copy(update={"closing_s": closing_s, "wall_s": wall_s, "explained": explained})


class LoaderResult(ResultModel):
    """How a rank's training batches were made, beside the steps and never part of their sum: seconds of all workers.

    `loader` is who made them: device, nvjpeg, native, threads, processes, or inline for the rank itself.
    `read_s` is getting bytes from the source, `decode_s` decoding and sizing them, `augment_s` changing whole batches,
    `collate_s` stacking and handing over. `wait_s` is how long the rank waited. `queue_depth` is the mean number of
    batches that lay ready when one was asked for, `ready` the share of batches that did not have to be waited for.
    `bytes_read` is what the source gave, `bytes_made` the pixels handed on. `busy` is the share of the workers' time
    in which they worked (None without workers).
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
    """The way of rank 0's batches to its device, for a step (means).

    `estimate_batch_bytes` come from host memory: images as bytes, labels, and what augmentation on the device draws; 0
    where the loader makes batches on the device. `copied_bytes` of them are copied to another memory, none on a CPU.
    `copy_s` is how long that takes on the GPU, beside what it computes, and `bytes_per_s` the rate, None where no copy
    was timed. What a step waits for it is the stage `h2d`.
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
    """A bucket of gradients: bytes sent, and means over `n` steps of when it was ready and how long it took.

    `ready_s` is counted from the first bucket of the step being ready, `wire_s` from ready to averaged.
    """

    bytes: int
    ready_s: float
    wire_s: float
    n: int


class CommunicationResult(ResultModel):
    """What averaging gradients took on rank 0, in seconds of a step (means).

    `compute_exposed_s` is what a step waits for: from the rank's last gradient being ready to all being averaged, other
    ranks' lateness included; `share` is that of the step. `bytes`, `wire_s` (first bucket ready to last one averaged),
    `overlap` (the share of `wire_s` that hides behind backward) and `buckets` need `measure.communication=on`.
    """

    exposed_s: float
    share: float
    bytes: int | None = None
    wire_s: float | None = None
    overlap: float | None = None
    buckets: tuple[BucketResult, ...] = ()


class RankResult(ResultModel):
    """A rank's means over the counted steps, in seconds of a step; stages are in device seconds.

    `late_s` is how much longer the others waited for gradients and buffers than it did: 0 where that cannot be told.
    """

    rank: int
    step_s: float
    late_s: float
    stages: dict[str, float]


class StragglerResult(ResultModel):
    """What ranks lose by waiting for the latest of them: seconds of a step, and the share of it.

    `late_steps` is the share of steps in which some rank was late by 5 % of a step or more: little where one long stall
    is what was lost. `rank` is the one that is late again and again, by `late_s` seconds, and `stage` where it spends
    more than the others; None and 0 where now one rank and now another is late.
    """

    lost_s: float
    share: float
    rank: int | None = None
    stage: str | None = None
    late_s: float = 0.0
    late_steps: float = 0.0


class CpuResult(ResultModel):
    """The CPU time of a rank over the counted steps: of the rank that lost the largest share to other processes.

    `run_s` is how long its threads and those of its loader workers ran, `waited_s` how long they were ready to run and
    waited for a core, both summed over threads. `lost_s` of that is charged to other processes (and to a hypervisor),
    the rest to the run's own; `share` is `lost_s` over that and `run_s`, `own_share` likewise. `throttled_share` is
    the time that a CPU quota has stopped it, over that and what the run used. `others_cores` is how many of its `cores`
    other processes kept busy on average, `pressure` the share of time in which anything on the node waited for a CPU
    (PSI), and `switches` how often a thread of the rank was taken off its core. `ranks` share these cores, and each
    computes with `threads`.
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
    """The most memory that rank 0 has held at once, in bytes: of the host, and of its GPU (None without one).

    `host_bytes` is the process's resident set, mapped files it has touched included, without its workers'.
    """

    host_bytes: int
    device_bytes: int | None = None


class CheckpointResult(ResultModel):
    """What saving came to in this process: checkpoints on disk and failed ones; seconds and bytes are means of one.

    `stall_s` is how long training stood still, `write_s` how long it took until the checkpoint was safe on disk.
    """

    saved: int
    failed: int
    stall_s: float
    write_s: float
    bytes: int


class GoodputResult(ResultModel):
    """Where the wall clock went since the run was first started, over all its processes: seconds that add up.

    `useful_s` is the time of steps whose work is in the result, each counted once; `share` is that of `wall_s`.
    `rework_s` is the time of steps that were lost with a process and done again, `down_s` the time between
    processes (detection, queue, restart), `starts` how many processes of rank 0 there were.
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
    """A finished run.

    `eval` is the last evaluation, None when the recipe asked for none; `ema` is that of the averaged weights and
    `train_eval` that on training images, None when the recipe asked for neither, and `gap` is top-1 of `train_eval`
    less that of `eval`. `best` is the best evaluation of the weights that are judged: the averaged ones when there are
    any; `best_step` and `best_epoch` say after how many steps and epochs. `skipped_steps` moved nothing, as their loss
    or gradient was no number. `bad_images` is how many different images could not be read and were left out.
    `parameters` (of the network), `trained_parameters` (those not frozen), `best_step`, `best_epoch`, `goodput`,
    `checkpoints`, `account`, `memory` and `cpu` are None in results of before they were recorded, and `cpu` also where
    the kernel does not tell how long threads wait; `loader` and `compute_host_to_device` are None with
    `measure.clock=off`, `communication` also where gradients are not averaged by ddp, and `straggler` likewise and
    where there is one rank, which is when `ranks` is empty. `health` is what is wrong with what was learnt, the worst
    first; it is empty where nothing was found, and None on ranks other than 0 and in results of before it was recorded.
    `verdict` has `bottleneck`, `evidence`, `ceiling` and
    `try`. `provenance` says what it was measured on and how it was started; in a batch job `job_id`, and
    `job_restarts`, how often that was queued again (SLURM_RESTART_COUNT).
    `run_dir` is where the run is, known of what `paceline.train` returns.
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
        """Images/s in steady state (`throughput`); None where no step was counted, which is 0 in the JSON."""
        return self.throughput.images_per_s if self.throughput.n else None

    @property
    def epoch_images(self) -> float | None:
        """Images of an epoch as it was trained; None where there was no step."""
        return self.images_seen / self.epochs if self.epochs > 0 else None

    @property
    def starved(self) -> float | None:
        """The share of time that other processes took from a CPU-starved run; None for a run that was not."""
        return self.cpu.share if self.cpu is not None and self.verdict.get("bottleneck") == CPU_STARVED else None

    def how_it_ended(self, total_steps: int | None = None) -> str:
        """Return the status in a person's words, such as `stopped (SIGTERM) at step 85 of 180`, of `total_steps`."""
        of_all = "" if total_steps is None else f" of {total_steps:,}"
        match self.status:
            case "preempted":
                by = self.provenance.get("stopped_by")
                return f"stopped{f' ({by})' if isinstance(by, str) else ''} at step {self.steps:,}{of_all}"
            case "failed":
                return f"failed: the weights of the last step, {self.steps:,}, could not be saved"
        return self.status.replace("_", " ")

    def of(self, run_dir: Path) -> Self:
        """Return this result as that of the run in `run_dir`, which is not part of the JSON: runs are moved."""
        return self.model_copy(update={"run_dir": run_dir})


def epoch_seconds(results: Iterable[RunResult], images_per_s: Interval | None) -> float | None:
    """Return the seconds of an epoch, as the runs of one setting have it, at a speed; None without either."""
    images = next((found for result in results if (found := result.epoch_images) is not None), None)
    return None if images is None or images_per_s is None else images / images_per_s.value


def starved_note(results: Iterable[RunResult]) -> str:
    """Return that some runs were CPU-starved, and by how much at most, as part of a sentence; "" where none was."""
    runs = list(results)
    shares = [run.starved for run in runs if run.starved is not None]
    if not shares:
        return ""
    of_runs = "" if len(runs) == 1 else f" in {len(shares)} of {count(len(runs), 'run')}"
    up_to = " up to" if len(shares) > 1 else ""
    return f"other processes held the cores{up_to} {100 * max(shares):.0f} % of the time{of_runs}"
