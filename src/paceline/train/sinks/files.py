"""Log files of a run directory."""

import csv
import io
from collections.abc import Callable, Sequence

from paceline.core.files import open_text_to_write
from paceline.core.results import RunResult
from paceline.core.rundir import RunDir, append_line, read_lines, write_atomic
from paceline.measure.rate import unix_s
from paceline.recipe.plan import Plan
from paceline.train.logsink import EvalRecord, StepRecord, to_eval_row, to_step_row
from paceline.train.sinks.lines import append_record, open_from_step


class FileSink:
    """Write `steps.jsonl`, `evals.jsonl`, `warnings.jsonl`, `metrics.csv`, and `classes.csv` and `confusion.csv` of the
    last evaluation.

    Rows after step `resume_step` are dropped, and evaluations after `last_eval`: these steps will run again. Warnings
    are kept, with the time of `now` (seconds since 1970). `columns` are those of `metrics.csv`.
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

    def started(self, plan: Plan, step: int) -> None:
        """Do nothing: the plan has a file of its own."""

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

    def finished(self, result: RunResult) -> None:
        """Do nothing: the result has a file of its own."""

    def close(self) -> None:
        """Close the files."""
        for file in (self._steps, self._evals, self._metrics):
            file.close()
