"""Collect the evidence for `core.health`: state that all ranks have, and log files of rank 0."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import PacelineError
from paceline.core.health import Evidence, Point, findings, losses_of, points_of
from paceline.core.results import BatchNormCheck, EvalReport, EvalResult, Finding, Status
from paceline.core.rundir import RunDir, checkpoint_name, read_lines
from paceline.train.checkpoint import read_state
from paceline.train.precision import DynamicScale, Precision
from paceline.train.state import TrainState

_MAX_RECORDS: Final = 1_000_000
"""Most records to read per file, which takes a few seconds at the end of a run."""


def known_everywhere(state: TrainState, status: Status, steps_per_epoch: int, precision: Precision) -> Evidence:
    """Return the evidence that is the same on every rank at the end of a run."""
    last = state.last
    points = (Point.of(last, state.last_step, state.last_step / steps_per_epoch),) if last else ()
    return replace(
        _tables(last) if last else Evidence(()),
        points=points,
        status=status,
        steps=state.step,
        skipped=state.skipped,
        scales_loss=isinstance(precision.scale, DynamicScale),
        best=state.best,
        best_step=state.best_step if state.best else None,
    )


def known_of_weights(report: EvalReport) -> Evidence:
    """Return the evidence of a stand-alone evaluation."""
    return replace(_tables(report), points=(Point.of(report),), is_alone=True)


def best_before(checkpoint: Path) -> tuple[EvalResult | None, int | None]:
    """Return the best evaluation up to `checkpoint` and its step, or (None, None) if they cannot be read.

    This is optional information, so a checkpoint of another paceline version is no error. Raise `CheckpointError` for a
    damaged one.
    """
    progress = read_state(checkpoint).get("train", {})
    try:
        best, step = EvalResult.model_validate(progress["best"]), int(progress["best_step"])
    except (LookupError, OverflowError, TypeError, ValueError):
        return None, None
    return (best, step) if 0 <= best.top1 <= 1 else (None, None)


def health_of_run(known: Evidence, rundir: RunDir, check: BatchNormCheck | None) -> tuple[Finding, ...]:
    """Return the findings on the run in `rundir`. Unreadable files are ignored."""
    best = known.best_step
    return findings(
        replace(
            known,
            points=points_of(_records(rundir.evals)) or known.points,
            losses=losses_of(_records(rundir.steps)),
            best_kept=None if best is None else (rundir.checkpoints / checkpoint_name(best)).is_dir(),
            batch_norm=check,
        )
    )


def _tables(report: EvalReport) -> Evidence:
    """Return the per-class tables as evidence. A restored evaluation has none."""
    table = report.classes
    return Evidence((), classes=table.classes, confusion=table.confusion) if table else Evidence(())


def _records(path: Path) -> Iterable[dict[str, Any]]:
    try:
        return list(islice(read_lines(path), _MAX_RECORDS))
    except (OSError, PacelineError):
        return ()
