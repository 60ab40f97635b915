"""Read the records of a run back from its files."""

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.core.rundir import RunDir, read_lines
from paceline.train.logsink import EvalRecord, StepRecord, eval_record


def history(rundir: RunDir, last_step: int) -> Iterator[StepRecord | EvalRecord]:
    """Yield the logged steps and evaluations up to `last_step` in order.

    The files may grow meanwhile. Raise `PacelineError` for an invalid line.
    """
    steps: Iterator[StepRecord | EvalRecord] = (StepRecord(**row) for row in _rows(rundir.steps, last_step))
    evaluations: Iterator[StepRecord | EvalRecord] = (eval_record(row) for row in _rows(rundir.evals, last_step))
    yield from heapq.merge(steps, evaluations, key=_step_of)


def _rows(path: Path, last_step: int) -> Iterator[dict[str, Any]]:
    return (row for row in read_lines(path, of_steps=True) if row["step"] <= last_step)


def _step_of(record: StepRecord | EvalRecord) -> int:
    return record.step
