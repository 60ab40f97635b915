"""The log sink protocol, its records, and the JSON lines that both become. Only rank 0 has sinks."""

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol

from paceline.core.files import open_text_to_write
from paceline.core.metric import MULTI_LABEL
from paceline.core.results import EvalReport, EvalResult, RunResult
from paceline.core.run_dir import RunDir, read_lines, write_atomic
from paceline.recipe.plan import Plan
from paceline.recipe.schema.optim import OptimSection, ScheduleFree
from paceline.recipe.schema.train import Log, Train

if TYPE_CHECKING:  # it imports torch
    from paceline.data.batch import Batch


def open_from_step(path: Path, last_step: int) -> IO[str]:
    """Open a JSON-lines file for appending, after dropping the records past `last_step`."""
    drop_records_after(path, last_step)
    return open_text_to_write(path, "a")


def drop_records_after(path: Path, last_step: int) -> None:
    """Drop the records after `last_step` from a JSON-lines file, which is created if it is missing."""
    kept = [record for record in read_lines(path, of_steps=True) if record["step"] <= last_step]
    write_atomic(path, "".join(json.dumps(record) + "\n" for record in kept))


def append_record(file: IO[str], record: dict[str, Any]) -> None:
    """Append `record` and flush."""
    file.write(json.dumps(record) + "\n")
    file.flush()


@dataclass(frozen=True)
class StepRecord:
    """A logged step: `loss` is the mean over all ranks since the last record, `images_per_s` the global throughput.

    `top1` and `top5`, shares from 0 to 1, are of the training batches since then; None unless `train.accuracy` is on.
    `trained_s` is in seconds. `stage_shares` has rank 0's shares of step time by stage since then, from 0 to 1; empty
    without a measured step.
    """

    step: int
    epoch: float
    images_seen: int
    loss: float
    lr: float
    images_per_s: float
    trained_s: float
    top1: float | None = None
    top5: float | None = None
    stage_shares: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalRecord:
    """An evaluation after `step` steps and `trained_s` seconds of training, with its report.

    `skipped` steps did not update the weights. `train_s` is `trained_s` without evaluations and checkpoints, in
    seconds. `epoch_s` (seconds per epoch) and `images_per_s` measure the training since the previous evaluation; None
    in rows of older versions. `batch_top1` and `batch_top5` are shares from 0 to 1 of the training batches since then;
    None unless `train.accuracy` is on.
    """

    step: int
    epoch: float
    images_seen: int
    trained_s: float
    report: EvalReport
    skipped: int = 0
    train_s: float | None = None
    epoch_s: float | None = None
    images_per_s: float | None = None
    batch_top1: float | None = None
    batch_top5: float | None = None


_POSITION_COLUMNS = ("step", "epoch", "images_seen", "trained_s")
_RESULT_COLUMNS = ("images", "top1", "top5", "loss", "ece", "mean_class_accuracy")
_EMA_COLUMNS = tuple(f"ema_{name}" for name in _RESULT_COLUMNS if name != "images")
_TRAIN_COLUMNS = ("train_top1", "train_loss", "gap")
_SPEED_COLUMNS = ("train_s", "epoch_s", "images_per_s")
_BATCH_COLUMNS = ("batch_top1", "batch_top5")
_KNOWN_COLUMNS: Final = frozenset(
    (*_POSITION_COLUMNS, *_RESULT_COLUMNS, *_EMA_COLUMNS, *_TRAIN_COLUMNS, *_SPEED_COLUMNS, *_BATCH_COLUMNS)
)
"""All columns but those of `train.metrics`."""
_SHARE_SUFFIX: Final = "_share"


def eval_columns(train: Train, optim: OptimSection, *, is_multi_label: bool = False) -> tuple[str, ...]:
    """Return the keys of the evaluations of a run."""
    is_averaged = train.ema != "off" or isinstance(optim, ScheduleFree)
    sees_train = train.eval_train == "on"
    extra: tuple[str, ...] = (*_RESULT_COLUMNS, *train.extra_metrics)
    if is_multi_label:
        own = (name for name in train.extra_metrics if name not in MULTI_LABEL)
        extra = ("images", "loss", *MULTI_LABEL, *own)
    return (
        *_POSITION_COLUMNS,
        *extra,
        *((f"ema_{name}" for name in extra if name != "images") if is_averaged else ()),
        *((name for name in _TRAIN_COLUMNS if not is_multi_label or name != "train_top1") if sees_train else ()),
        *_SPEED_COLUMNS,
        *(_BATCH_COLUMNS if train.accuracy == "on" else ()),
    )


def to_eval_row(record: EvalRecord) -> dict[str, Any]:
    """Return an evaluation as plain values for JSON and CSV, with the keys of `eval_columns`."""
    report = record.report
    row = {name: getattr(record, name) for name in _POSITION_COLUMNS}
    row |= report.val.to_row()
    if report.ema is not None:
        row |= {f"ema_{name}": value for name, value in report.ema.to_row().items() if name != "images"}
    if report.train is not None:
        train = report.train.model_dump(mode="json", include={"top1", "loss"})
        row |= {f"train_{name}": value for name, value in train.items()} | {"gap": report.gap}
    row |= {name: getattr(record, name) for name in _SPEED_COLUMNS}
    return row if record.batch_top1 is None else row | {name: getattr(record, name) for name in _BATCH_COLUMNS}


def to_step_row(record: StepRecord) -> dict[str, Any]:
    """Return a logged step as plain values for JSON, without unmeasured ones."""
    values = asdict(record)
    shares = values.pop("stage_shares")
    return {name: value for name, value in values.items() if value is not None} | flatten_shares(shares)


def from_step_row(row: Mapping[str, Any]) -> StepRecord:
    """Return the logged step of a `row` that `to_step_row` made."""
    shares = {name: value for name, value in row.items() if name.endswith(_SHARE_SUFFIX)}
    others = {name: value for name, value in row.items() if name not in shares}
    return StepRecord(**others, stage_shares={name.removesuffix(_SHARE_SUFFIX): each for name, each in shares.items()})


def flatten_shares(stage_shares: Mapping[str, float]) -> dict[str, float]:
    """Return shares by stage with the flat keys of logs, such as `data_wait_share`."""
    return {f"{stage}{_SHARE_SUFFIX}": each for stage, each in stage_shares.items()}


def from_eval_row(row: Mapping[str, Any]) -> EvalRecord:
    """Return the evaluation of a `row` that `to_eval_row` made.

    Of the evaluation on training images a row has top-1 and loss only; other metrics are NaN, and the images 0.
    """
    is_averaged = any(name in row for name in _EMA_COLUMNS)
    averaged = {name[4:]: row[name] for name in _EMA_COLUMNS if name in row} if is_averaged else None
    metrics = {name: value for name, value in row.items() if name not in _KNOWN_COLUMNS}
    if averaged:
        of_average = {name[4:]: metrics.pop(name) for name in [*metrics] if name.startswith("ema_")}
        averaged["metrics"] = of_average or None
    report = EvalReport(
        val=EvalResult(**{name: row[name] for name in _RESULT_COLUMNS if name in row}, metrics=metrics or None),
        ema=EvalResult(images=row["images"], **averaged) if averaged else None,
        train=EvalResult(images=0, top1=row.get("train_top1", math.nan), loss=row["train_loss"])
        if "train_loss" in row
        else None,
    )
    position: dict[str, Any] = {name: row[name] for name in _POSITION_COLUMNS}
    optional: dict[str, Any] = {name: row.get(name) for name in (*_SPEED_COLUMNS, *_BATCH_COLUMNS)}
    return EvalRecord(**position, **optional, report=report)


class LogSink(Protocol):
    """Receive the records of a run. A subclass may leave out `started`, `warned` and `finished`."""

    def started(self, plan: Plan, step: int) -> None:
        """Receive the plan of the run, and the step it starts from."""
        return

    def step(self, record: StepRecord) -> None:
        """Receive a logged step."""
        ...

    def evaluated(self, record: EvalRecord) -> None:
        """Receive an evaluation."""
        ...

    def warned(self, message: str) -> None:
        """Receive a one-line warning, which does not end the run; possibly before `started`."""
        return

    def finished(self, result: RunResult) -> None:
        """Receive the result of a run that finished or was preempted, but did not fail."""
        return

    def close(self) -> None:
        """Flush and close. This is the last call."""
        ...


class ForwardingSink:
    """A sink that passes each call to `forward`."""

    def forward(self, call: Callable[[LogSink], None]) -> None:
        """Apply `call` to the sinks behind this one."""
        raise NotImplementedError

    def started(self, plan: Plan, step: int) -> None:
        """Forward the plan."""
        self.forward(lambda sink: sink.started(plan, step))

    def step(self, record: StepRecord) -> None:
        """Forward a logged step."""
        self.forward(lambda sink: sink.step(record))

    def evaluated(self, record: EvalRecord) -> None:
        """Forward an evaluation."""
        self.forward(lambda sink: sink.evaluated(record))

    def warned(self, message: str) -> None:
        """Forward a warning."""
        self.forward(lambda sink: sink.warned(message))

    def finished(self, result: RunResult) -> None:
        """Forward the result."""
        self.forward(lambda sink: sink.finished(result))

    def close(self) -> None:
        """Close the sinks."""
        self.forward(lambda sink: sink.close())


@dataclass(frozen=True)
class SinkGroup(ForwardingSink):
    """Several sinks as one. All `on_close` are called before the first sink is closed: they close concurrently."""

    sinks: Sequence[LogSink]
    on_close: Sequence[Callable[[], None]] = ()

    def forward(self, call: Callable[[LogSink], None]) -> None:
        """Apply `call` to every sink."""
        for sink in self.sinks:
            call(sink)

    def close(self) -> None:
        """Close all sinks."""
        for end in self.on_close:
            end()
        super().close()


class SampleTrace:
    """Write sample indices and the CRC-32 of each image's augmented pixels, one line per step."""

    def __init__(self, rundir: RunDir, rank: int, resume_step: int) -> None:
        self._file = open_from_step(rundir.samples(rank), resume_step - 1)

    def record(self, step: int, batch: "Batch") -> None:
        """Append a line for the batch of optimizer step `step`, from 0."""
        crc32 = [zlib.crc32(image.numpy().tobytes()) for image in batch.images]
        append_record(self._file, {"step": step, "samples": batch.indices.tolist(), "crc32": crc32})

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def build_sample_trace(log: Log, rundir: RunDir, rank: int, resume_step: int) -> SampleTrace | None:
    """Return the sample trace of `rank`, or None if `log.samples` is off."""
    return SampleTrace(rundir, rank, resume_step) if log.samples else None
