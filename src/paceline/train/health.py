"""Collect the evidence for `core.health`: state that all ranks have, and log files of rank 0."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import PacelineError
from paceline.core.health import EvalPoint, RunHistory, eval_points, find_problems, training_losses
from paceline.core.results import BatchNormCheck, EvalReport, EvalResult, Finding, Status
from paceline.core.rundir import RunDir, checkpoint_name, read_lines
from paceline.train.checkpoint import read_state
from paceline.train.precision import DynamicLossScaler, Precision
from paceline.train.state import TrainState

_MAX_RECORDS: Final = 1_000_000
"""Most records to read per file, which takes a few seconds at the end of a run."""


def collect_evidence(state: TrainState, status: Status, steps_per_epoch: int, precision: Precision) -> RunHistory:
    """Return the evidence that is the same on every rank at the end of a run."""
    last = state.last
    points = (EvalPoint.of(last, state.last_step, state.last_step / steps_per_epoch),) if last else ()
    return replace(
        _class_tables(last) if last else RunHistory(()),
        points=points,
        status=status,
        steps=state.step,
        skipped=state.skipped,
        scales_loss=isinstance(precision.scale, DynamicLossScaler),
        best=state.best,
        best_step=state.best_step if state.best else None,
    )


def evidence_from_report(report: EvalReport) -> RunHistory:
    """Return the evidence of a stand-alone evaluation."""
    return replace(_class_tables(report), points=(EvalPoint.of(report),), is_alone=True)


def read_best_evaluation(checkpoint: Path) -> tuple[EvalResult | None, int | None]:
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


def diagnose_run(known: RunHistory, rundir: RunDir, check: BatchNormCheck | None) -> tuple[Finding, ...]:
    """Return the findings on the run in `rundir`. Unreadable files are ignored."""
    best = known.best_step
    return find_problems(
        replace(
            known,
            points=eval_points(_read_records(rundir.evals)) or known.points,
            losses=training_losses(_read_records(rundir.steps)),
            best_kept=None if best is None else (rundir.checkpoints / checkpoint_name(best)).is_dir(),
            batch_norm=check,
        )
    )


def _class_tables(report: EvalReport) -> RunHistory:
    """Return the per-class tables as evidence. A restored evaluation has none."""
    table = report.classes
    return RunHistory((), classes=table.classes, confusion=table.confusion) if table else RunHistory(())


def _read_records(path: Path) -> Iterable[dict[str, Any]]:
    try:
        return list(islice(read_lines(path), _MAX_RECORDS))
    except (OSError, PacelineError):
        return ()
