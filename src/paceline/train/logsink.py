"""What a run tells of itself, and the protocol of whoever is told: files, trackers, a terminal. Only rank 0 has any.

`train.sinks` has the places that a recipe asks for.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from paceline.core.results import EvalReport, EvalResult, RunResult
from paceline.core.rundir import RunDir
from paceline.data.batch import Batch
from paceline.recipe.plan import Plan
from paceline.recipe.schema.log import Log
from paceline.recipe.schema.optim import ScheduleFree
from paceline.recipe.schema.recipe import Recipe
from paceline.train.sinks.lines import add, reopened


@dataclass(frozen=True)
class StepRecord:
    """A logged step: `loss` is the mean over all ranks since the last record; `images_per_s` likewise is global.

    `top1` and `top5` are of the images of those training batches; None unless `train.accuracy` is on.
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


@dataclass(frozen=True)
class EvalRecord:
    """An evaluation: after which step, how long the run had trained by its end, and what came out.

    `skipped` is how many of the steps had moved nothing. `train_s` is `trained_s` without evaluations and
    checkpoints. `epoch_s`, seconds of that per epoch, and `images_per_s` are of the training since the evaluation
    before: with one evaluation per epoch, of that epoch. They are None in rows of before they were recorded.
    `batch_top1` and `batch_top5` are of the training batches since then; None unless `train.accuracy` is on.
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


_PLACE = ("step", "epoch", "images_seen", "trained_s")
_RESULT = ("images", "top1", "top5", "loss", "ece", "mean_class_accuracy")
_AVERAGED = tuple(f"ema_{name}" for name in _RESULT if name != "images")
_TRAINED = ("train_top1", "train_loss", "gap")
_SPEED = ("train_s", "epoch_s", "images_per_s")
_OF_BATCHES = ("batch_top1", "batch_top5")


def eval_columns(recipe: Recipe) -> tuple[str, ...]:
    """Return the keys of the evaluations of a run: of the weights as they are, and of what else `recipe` asks for."""
    is_averaged = recipe.train.ema != "off" or isinstance(recipe.optim, ScheduleFree)
    sees_train = recipe.train.eval_train == "on"
    return (
        *_PLACE,
        *_RESULT,
        *(_AVERAGED if is_averaged else ()),
        *(_TRAINED if sees_train else ()),
        *_SPEED,
        *(_OF_BATCHES if recipe.train.accuracy == "on" else ()),
    )


def eval_row(record: EvalRecord) -> dict[str, Any]:
    """Return an evaluation as plain values for JSON and CSV, with keys as in `eval_columns`."""
    report = record.report
    row = {name: getattr(record, name) for name in _PLACE}
    row |= report.val.model_dump(mode="json")
    if report.ema is not None:
        row |= {f"ema_{name}": value for name, value in report.ema.model_dump(mode="json", exclude={"images"}).items()}
    if report.train is not None:
        train = report.train.model_dump(mode="json", include={"top1", "loss"})
        row |= {f"train_{name}": value for name, value in train.items()} | {"gap": report.gap}
    row |= {name: getattr(record, name) for name in _SPEED}
    return row if record.batch_top1 is None else row | {name: getattr(record, name) for name in _OF_BATCHES}


def step_row(record: StepRecord) -> dict[str, Any]:
    """Return a logged step as plain values for JSON, without what was not measured."""
    return {name: value for name, value in asdict(record).items() if value is not None}


def eval_record(row: Mapping[str, Any]) -> EvalRecord:
    """Return the evaluation that `eval_row` made `row` of.

    Of that on training images a row has top-1 and loss alone: the rest is no number, and how many there were is 0.
    """
    averaged = {name.removeprefix("ema_"): row[name] for name in _AVERAGED} if _AVERAGED[0] in row else None
    report = EvalReport(
        val=EvalResult(**{name: row[name] for name in _RESULT}),
        ema=EvalResult(images=row["images"], **averaged) if averaged else None,
        train=EvalResult(images=0, top1=row["train_top1"], top5=math.nan, loss=row["train_loss"])
        if "train_top1" in row
        else None,
    )
    place = {name: row[name] for name in _PLACE} | {name: row.get(name) for name in (*_SPEED, *_OF_BATCHES)}
    return EvalRecord(**place, report=report)


class LogSink(Protocol):
    """Take note of what happens."""

    def started(self, plan: Plan, step: int) -> None:
        """Take the plan of the run, and the step it starts from."""
        ...

    def step(self, record: StepRecord) -> None:
        """Take a logged step."""
        ...

    def evaluated(self, record: EvalRecord) -> None:
        """Take an evaluation."""
        ...

    def warned(self, message: str) -> None:
        """Take one line that a person should read, and that does not end the run; also before `started`."""
        ...

    def finished(self, result: RunResult) -> None:
        """Take the result of a run that has ended, or that leaves to go on later; not that of one that failed."""
        ...

    def close(self) -> None:
        """Write what is left and let go. Nothing comes after it."""
        ...


@dataclass(frozen=True)
class Sinks:
    """Several sinks as one; none at all on ranks other than 0.

    Before the first is closed, all `ends` are called: so those that take long to end do so at once.
    """

    sinks: Sequence[LogSink]
    ends: Sequence[Callable[[], None]] = ()

    def started(self, plan: Plan, step: int) -> None:
        """Pass the plan on."""
        for sink in self.sinks:
            sink.started(plan, step)

    def step(self, record: StepRecord) -> None:
        """Pass a logged step on."""
        for sink in self.sinks:
            sink.step(record)

    def evaluated(self, record: EvalRecord) -> None:
        """Pass an evaluation on."""
        for sink in self.sinks:
            sink.evaluated(record)

    def warned(self, message: str) -> None:
        """Pass a warning on."""
        for sink in self.sinks:
            sink.warned(message)

    def finished(self, result: RunResult) -> None:
        """Pass the result on."""
        for sink in self.sinks:
            sink.finished(result)

    def close(self) -> None:
        """Close all."""
        for end in self.ends:
            end()
        for sink in self.sinks:
            sink.close()


class SampleTrace(Protocol):
    """Take note of which samples a rank trains on."""

    def record(self, step: int, batch: Batch) -> None:
        """Take the batch of optimizer step `step`, from 0."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


class NoTrace:
    """Take no note."""

    def record(self, step: int, batch: Batch) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class FileTrace:
    """Write sample indices, and a CRC-32 of each image's augmented pixels, a line a step."""

    def __init__(self, rundir: RunDir, rank: int, resume_step: int) -> None:
        self._file = reopened(rundir.samples(rank), resume_step - 1)

    def record(self, step: int, batch: Batch) -> None:
        """Append a line for `step`."""
        crc32 = [zlib.crc32(image.numpy().tobytes()) for image in batch.images]
        add(self._file, {"step": step, "samples": batch.indices.tolist(), "crc32": crc32})

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def build_trace(log: Log, rundir: RunDir, rank: int, resume_step: int) -> SampleTrace:
    """Return what records the samples of `rank`: a file when `log.samples` asks for it."""
    return FileTrace(rundir, rank, resume_step) if log.samples else NoTrace()
