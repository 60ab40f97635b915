"""Where the numbers of a run go: files, TensorBoard, a terminal. Only rank 0 has any."""

import csv
import importlib.util
import io
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from paceline.core.errors import RecipeError
from paceline.core.results import EvalResult
from paceline.core.rundir import RunDir, read_lines, write_atomic
from paceline.data.loader import Batch
from paceline.recipe.plan import Plan
from paceline.recipe.schema.recipe import Log


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
    """An evaluation: after which step, how long the run had trained by its end, and what came out."""

    step: int
    epoch: float
    images_seen: int
    trained_s: float
    result: EvalResult


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

    def close(self) -> None:
        """Write what is left and let go."""
        ...


class FileSink:
    """`steps.jsonl`, `evals.jsonl` and `metrics.csv`. Rows after `resume_step` are dropped: they will come again."""

    def __init__(self, rundir: RunDir, resume_step: int) -> None:
        self._steps = _reopened(rundir.steps, resume_step)
        self._evals = _reopened(rundir.evals, resume_step)
        columns = ["step", "epoch", "images_seen", "trained_s", "images", "top1", "top5", "loss"]
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
        """Append a line to `evals.jsonl` and a row to `metrics.csv`."""
        row = asdict(record)
        row |= row.pop("result").model_dump(mode="json")
        _append(self._evals, row)
        self._rows.writerow(row)
        self._metrics.flush()

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
        """Write accuracies and loss."""
        result = record.result
        self._scalars({"val/top1": result.top1, "val/top5": result.top5, "val/loss": result.loss}, record.step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()

    def _scalars(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


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
    rundir: RunDir, tensorboard: Literal["auto", "on", "off"], resume_step: int, extra: Sequence[LogSink]
) -> Sinks:
    """Return rank 0's sinks: files, TensorBoard as asked, and `extra` ones such as a terminal's."""
    sinks: list[LogSink] = [FileSink(rundir, resume_step)]
    if tensorboard != "off" and _has_tensorboard():
        sinks.append(TensorBoardSink(rundir, resume_step))
    return Sinks([*sinks, *extra])


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
