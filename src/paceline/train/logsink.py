"""Where the numbers of a run go: files, TensorBoard, a terminal. Only rank 0 has any."""

import csv
import importlib.util
import io
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from paceline.core.errors import RecipeError
from paceline.core.results import EvalReport
from paceline.core.rundir import RunDir, append_line, read_lines, write_atomic
from paceline.data.batch import Batch
from paceline.measure.rate import unix_s
from paceline.recipe.plan import Plan
from paceline.recipe.schema.optim import ScheduleFree
from paceline.recipe.schema.recipe import Log, Recipe


@dataclass(frozen=True)
class StepRecord:
    """A logged step: `loss` is the mean over all ranks since the last record; `images_per_s` likewise is global."""

    step: int
    epoch: float
    images_seen: int
    loss: float
    lr: float
    images_per_s: float
    trained_s: float


@dataclass(frozen=True)
class EvalRecord:
    """An evaluation: after which step, how long the run had trained by its end, and what came out.

    `skipped` is how many of the steps had moved nothing.
    """

    step: int
    epoch: float
    images_seen: int
    trained_s: float
    report: EvalReport
    skipped: int = 0


_PLACE = ("step", "epoch", "images_seen", "trained_s")
_RESULT = ("images", "top1", "top5", "loss", "ece", "mean_class_accuracy")
_AVERAGED = tuple(f"ema_{name}" for name in _RESULT if name != "images")
_TRAINED = ("train_top1", "train_loss", "gap")


def eval_columns(recipe: Recipe) -> tuple[str, ...]:
    """Return the keys of the evaluations of a run: of the weights as they are, and of what else `recipe` asks for."""
    is_averaged = recipe.train.ema != "off" or isinstance(recipe.optim, ScheduleFree)
    sees_train = recipe.train.eval_train == "on"
    return (*_PLACE, *_RESULT, *(_AVERAGED if is_averaged else ()), *(_TRAINED if sees_train else ()))


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
    return row


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

    def close(self) -> None:
        """Write what is left and let go."""
        ...


class FileSink:
    """`steps.jsonl`, `evals.jsonl`, `warnings.jsonl`, `metrics.csv`, and `classes.csv` and `confusion.csv` of the last
    evaluation.

    Rows after `resume_step` are dropped, and evaluations after `last_eval`: they will come again. Warnings stay, with
    the time of `now` (seconds since 1970), and their file appears with the first. `columns` are those of `metrics.csv`.
    """

    def __init__(
        self,
        rundir: RunDir,
        resume_step: int,
        columns: Sequence[str],
        now: Callable[[], float] = unix_s,
        *,
        last_eval: int | None = None,
    ) -> None:
        self._rundir = rundir
        self._now = now
        self._steps = _reopened(rundir.steps, resume_step)
        self._evals = _reopened(rundir.evals, resume_step if last_eval is None else last_eval)
        table = io.StringIO(newline="")
        rows = csv.DictWriter(table, columns)
        rows.writeheader()
        rows.writerows(read_lines(rundir.evals))
        write_atomic(rundir.metrics, table.getvalue())
        self._metrics = rundir.metrics.open("a", newline="", encoding="utf-8")
        self._rows = csv.DictWriter(self._metrics, columns)

    def started(self, plan: Plan, step: int) -> None:
        """Do nothing: the plan has a file of its own."""

    def step(self, record: StepRecord) -> None:
        """Append a line to `steps.jsonl`."""
        _append(self._steps, asdict(record))

    def evaluated(self, record: EvalRecord) -> None:
        """Append a line to `evals.jsonl` and a row to `metrics.csv`, and renew the tables of the classes."""
        row = eval_row(record)
        _append(self._evals, row)
        self._rows.writerow(row)
        self._metrics.flush()
        if record.report.classes is not None:
            self._rundir.write_classes(record.report.classes)

    def warned(self, message: str) -> None:
        """Append a line to `warnings.jsonl`."""
        append_line(self._rundir.warnings, {"unix_s": round(self._now(), 3), "message": message})

    def close(self) -> None:
        """Close the files."""
        for file in (self._steps, self._evals, self._metrics):
            file.close()


class TensorBoardSink:
    """Event files for TensorBoard."""

    def __init__(self, rundir: RunDir, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(rundir.tensorboard), purge_step=resume_step + 1)

    def started(self, plan: Plan, step: int) -> None:
        """Do nothing: TensorBoard shows no plan."""

    def step(self, record: StepRecord) -> None:
        """Write loss, learning rate and images/s."""
        self._scalars(
            {"train/loss": record.loss, "train/lr": record.lr, "images_per_s": record.images_per_s}, record.step
        )

    def evaluated(self, record: EvalRecord) -> None:
        """Write what came out: of the weights as they are, averaged, and on training images."""
        report = record.report
        for tag, result in (("val", report.val), ("ema", report.ema)):
            if result is not None:
                values = result.model_dump(exclude={"images"}, exclude_none=True)
                self._scalars({f"{tag}/{name}": value for name, value in values.items()}, record.step)
        if report.train is not None and report.gap is not None:
            scalars = {"train_eval/top1": report.train.top1, "train_eval/loss": report.train.loss, "gap": report.gap}
            self._scalars(scalars, record.step)

    def warned(self, message: str) -> None:
        """Do nothing: a warning is no curve."""

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()

    def _scalars(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


class Unfailing:
    """Pass everything to `inner`; a disk that refuses it is a warning to `others`, and not the end of the run.

    One warning stands for all refusals in a row. What was refused stays in the files' buffers, is tried again with
    the next record, and is lost when it comes to more than they hold.
    """

    def __init__(self, inner: LogSink, others: LogSink) -> None:
        self._inner = inner
        self._others = others
        self._has_failed = False

    def started(self, plan: Plan, step: int) -> None:
        """Pass the plan on."""
        self._try(lambda: self._inner.started(plan, step))

    def step(self, record: StepRecord) -> None:
        """Pass a logged step on."""
        self._try(lambda: self._inner.step(record))

    def evaluated(self, record: EvalRecord) -> None:
        """Pass an evaluation on."""
        self._try(lambda: self._inner.evaluated(record))

    def warned(self, message: str) -> None:
        """Pass a warning on."""
        self._try(lambda: self._inner.warned(message))

    def close(self) -> None:
        """Close it."""
        self._try(self._inner.close)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._has_failed:
                what = error.strerror or str(error)
                self._others.warned(f"log: a record cannot be written: {what} (training goes on; mend it to have more)")
            self._has_failed = True
        else:
            self._has_failed = False


@dataclass(frozen=True)
class Sinks:
    """Several sinks as one; none at all on ranks other than 0."""

    sinks: Sequence[LogSink]

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

    def close(self) -> None:
        """Close all."""
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
        self._file = _reopened(rundir.samples(rank), resume_step - 1)

    def record(self, step: int, batch: Batch) -> None:
        """Append a line for `step`."""
        crc32 = [zlib.crc32(image.numpy().tobytes()) for image in batch.images]
        _append(self._file, {"step": step, "samples": batch.indices.tolist(), "crc32": crc32})

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def build_sinks(
    rundir: RunDir, recipe: Recipe, resume_step: int, extra: Sequence[LogSink], *, last_eval: int | None = None
) -> Sinks:
    """Return rank 0's sinks: files, TensorBoard as asked, and `extra` ones such as a terminal's."""
    others = Sinks(extra)
    sinks: list[LogSink] = [FileSink(rundir, resume_step, eval_columns(recipe), last_eval=last_eval)]
    if recipe.log.tensorboard != "off" and _has_tensorboard():
        sinks.append(TensorBoardSink(rundir, resume_step))
    return Sinks([*(Unfailing(sink, others) for sink in sinks), *extra])


def require_tensorboard(log: Log) -> None:
    """Raise `RecipeError` when TensorBoard is asked for and not installed."""
    if log.tensorboard == "on" and not _has_tensorboard():
        raise RecipeError("log.tensorboard: on, but it is not installed (pip install 'paceline[tensorboard]')")


def _has_tensorboard() -> bool:
    found = importlib.util.find_spec("tensorboard")
    return found is not None and found.origin is not None  # a mere folder of that name is no package


def build_trace(log: Log, rundir: RunDir, rank: int, resume_step: int) -> SampleTrace:
    """Return what records the samples of `rank`: a file when `log.samples` asks for it."""
    return FileTrace(rundir, rank, resume_step) if log.samples else NoTrace()


def _reopened(path: Path, last_step: int) -> IO[str]:
    """Open a JSON-lines file to append to, with the records up to `last_step` that it already has."""
    kept = [record for record in read_lines(path) if record["step"] <= last_step]
    write_atomic(path, "".join(json.dumps(record) + "\n" for record in kept))
    return path.open("a", encoding="utf-8")


def _append(file: IO[str], record: dict[str, Any]) -> None:
    file.write(json.dumps(record) + "\n")
    file.flush()
