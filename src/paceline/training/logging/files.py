"""Write logs to files of the run directory, read them back, and survive a disk that refuses them."""

import csv
import heapq
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.core.files import open_text_to_write
from paceline.core.run_dir import RunDir, append_line, read_lines, write_atomic
from paceline.measure.throughput import unix_s
from paceline.training.logging.base import (
    EvalRecord,
    ForwardingSink,
    LogSink,
    StepRecord,
    append_record,
    from_eval_row,
    from_step_row,
    open_from_step,
    to_eval_row,
    to_step_row,
)


class FileSink(LogSink):
    """Write `steps.jsonl`, `evals.jsonl`, `warnings.jsonl`, `metrics.csv` with `columns`, and the per-class tables.

    Steps after `resume_step` and evaluations after `last_eval` will run again: their rows are dropped. Warnings are
    kept, with the time of `now` (seconds since 1970).
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
        self._steps = open_from_step(rundir.steps, resume_step)
        self._evals = open_from_step(rundir.evals, resume_step if last_eval is None else last_eval)
        table = io.StringIO(newline="")
        rows = csv.DictWriter(table, columns, extrasaction="ignore")  # the file may have been edited
        rows.writeheader()
        rows.writerows(read_lines(rundir.evals))
        write_atomic(rundir.metrics, table.getvalue())
        self._metrics = open_text_to_write(rundir.metrics, "a", newline="")
        self._rows = csv.DictWriter(self._metrics, columns)

    def step(self, record: StepRecord) -> None:
        """Append a line to `steps.jsonl`."""
        append_record(self._steps, to_step_row(record))

    def evaluated(self, record: EvalRecord) -> None:
        """Append to `evals.jsonl` and `metrics.csv`, and rewrite the per-class tables."""
        row = to_eval_row(record)
        append_record(self._evals, row)
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


def read_history(rundir: RunDir, last_step: int) -> Iterator[StepRecord | EvalRecord]:
    """Yield the logged steps and evaluations up to `last_step` in order.

    The files may grow meanwhile. Raise `PacelineError` for an invalid line.
    """
    steps: Iterator[StepRecord | EvalRecord] = (from_step_row(row) for row in _read_rows(rundir.steps, last_step))
    evaluations: Iterator[StepRecord | EvalRecord] = (from_eval_row(row) for row in _read_rows(rundir.evals, last_step))
    yield from heapq.merge(steps, evaluations, key=_get_step)


def _read_rows(path: Path, last_step: int) -> Iterator[dict[str, Any]]:
    return (row for row in read_lines(path, of_steps=True) if row["step"] <= last_step)


def _get_step(record: StepRecord | EvalRecord) -> int:
    return record.step


class SafeSink(ForwardingSink):
    """Forward to `inner`; if it fails to write, warn `others` once per series of failures, and continue.

    Failed records stay in the file buffers and are retried with the next record, until the buffers overflow.
    """

    def __init__(self, inner: LogSink, others: LogSink, name: str = "log") -> None:
        self._inner = inner
        self._others = others
        self._name = name
        self._has_failed = False

    def forward(self, call: Callable[[LogSink], None]) -> None:
        """Apply `call` to the inner sink."""
        try:
            call(self._inner)
        except (OSError, UnicodeError) as error:
            # Set before the others are warned: they may fail too, and warn this sink.
            is_first, self._has_failed = not self._has_failed, True
            if is_first:
                what = getattr(error, "strerror", None) or str(error)
                self._others.warned(
                    f"{self._name}: a record cannot be written: {what} (training continues; fix the cause)"
                )
        else:
            self._has_failed = False
