"""Read the records of a run back from its files."""

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.core.rundir import RunDir, read_lines
from paceline.train.logsink import EvalRecord, StepRecord, from_eval_row


def read_history(rundir: RunDir, last_step: int) -> Iterator[StepRecord | EvalRecord]:
    """Yield the logged steps and evaluations up to `last_step` in order.

    The files may grow meanwhile. Raise `PacelineError` for an invalid line.
    """
    steps: Iterator[StepRecord | EvalRecord] = (StepRecord(**row) for row in _read_rows(rundir.steps, last_step))
    evaluations: Iterator[StepRecord | EvalRecord] = (from_eval_row(row) for row in _read_rows(rundir.evals, last_step))
    yield from heapq.merge(steps, evaluations, key=_get_step)


def _read_rows(path: Path, last_step: int) -> Iterator[dict[str, Any]]:
    return (row for row in read_lines(path, of_steps=True) if row["step"] <= last_step)


def _get_step(record: StepRecord | EvalRecord) -> int:
    return record.step
