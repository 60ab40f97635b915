"""Read what a run recorded about a checkpoint: accuracy, training, hardware and energy."""

import csv
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.core.class_table import ClassCount
from paceline.core.csv_cells import from_cell
from paceline.core.errors import PacelineError
from paceline.core.files import open_to_read
from paceline.core.interval import Interval, wilson_interval
from paceline.core.json_file import read_json
from paceline.core.results import RunResult
from paceline.core.rundir import RunDir, read_lines

# An interval between telemetry samples that exceeds the median by this factor is downtime.
_GAP_FACTOR = 5


@dataclass(frozen=True)
class ConfusedPair:
    """A class, a class predicted for it, and the number of such images."""

    name: str
    taken_for: str
    images: int


@dataclass(frozen=True)
class CheckpointEval:
    """An evaluation: its weights, number of images, top-1 and top-5 with intervals, and classes.

    `classes` and `confused`, most frequent first, are known for the run's last evaluation only.
    """

    of: str
    num_images: int
    top1: Interval
    top5: Interval
    classes: tuple[ClassCount, ...] = ()
    confused: tuple[ConfusedPair, ...] = ()


@dataclass(frozen=True)
class CheckpointRecord:
    """Records of a checkpoint; a killed run has no result, and a run without evaluations no accuracy.

    `plan` and `machine` are as in their files, empty if missing. `images_seen` counts training images with repetition
    (None if the checkpoint was not evaluated). `result` is of the whole run. `energy_wh` is the energy of all GPUs of
    its nodes in watt-hours (None if not measured).
    """

    step: int
    evaluation: CheckpointEval | None
    plan: Mapping[str, Any]
    machine: Mapping[str, Any]
    result: RunResult | None
    images_seen: int | None = None
    energy_wh: float | None = None


def read_checkpoint_record(run: Path, checkpoint: Path) -> CheckpointRecord:
    """Return what run directory `run` recorded about `checkpoint`. Raise `PacelineError` for damaged files."""
    rundir = RunDir(run)
    step = int(checkpoint.name.removeprefix("step-"))
    evals = list(read_lines(rundir.evals))
    row = next((each for each in reversed(evals) if each.get("step") == step), None)
    evaluation = None if row is None else _parse_eval(row)
    if evaluation is not None and row is evals[-1]:
        evaluation = replace(evaluation, classes=rundir.read_classes(), confused=_read_confused_pairs(rundir.confusion))
    result = rundir.read_result() if (rundir.path / "result.json").is_file() else None
    return CheckpointRecord(
        step=step,
        evaluation=evaluation,
        plan=_read_json_object(rundir.path / "plan.json"),
        machine=_read_json_object(rundir.path / "machine.json"),
        result=result,
        images_seen=row.get("images_seen") if row else None,
        energy_wh=measured_energy_wh(rundir, result) if result else None,
    )


def _parse_eval(row: Mapping[str, Any]) -> CheckpointEval:
    # Averaged weights are the ones evaluated if the run has any.
    prefix = "ema_" if row.get("ema_top1") is not None else ""
    num_images = row["images"]
    top1, top5 = (wilson_interval(round(row[f"{prefix}{name}"] * num_images), num_images) for name in ("top1", "top5"))
    return CheckpointEval("the averaged weights" if prefix else "the weights", num_images, top1, top5)


def _read_confused_pairs(path: Path) -> tuple[ConfusedPair, ...]:
    # Off the diagonal.
    try:
        with TextIOWrapper(open_to_read(path), encoding="utf-8", newline="") as file:
            (_, *names), *rows = csv.reader(file, strict=True)
        cells = [
            ConfusedPair(from_cell(name), from_cell(names[column]), int(images))
            for row, (name, *values) in enumerate(rows)
            for column, images in enumerate(values)
            if column != row and int(images)
        ]
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, IndexError, csv.Error) as error:
        raise PacelineError(f"{path}: cannot be read: {error} (remove it)") from None
    return tuple(sorted(cells, key=lambda each: -each.images))


def measured_energy_wh(rundir: RunDir, result: RunResult) -> float | None:
    """Return the GPUs' energy in watt-hours: their time-weighted mean power times the run time of all processes."""
    ran_s = result.goodput.wall_s - result.goodput.down_s if result.goodput else result.time.wall_s
    nodes = [
        _mean_power_w(rundir.telemetry(node)) for node in range(len(list(rundir.path.glob("telemetry.node*.jsonl"))))
    ]
    total_w = math.fsum(nodes)
    return total_w * ran_s / 3600 if nodes and math.isfinite(total_w) else None


def _mean_power_w(path: Path) -> float:
    """Return the mean power of a node's GPUs in watts while a process ran; NaN if unknown."""
    samples = [(each["unix_s"], [gpu.get("power_w") for gpu in each.get("gpus", ())]) for each in read_lines(path)]
    known = [(unix_s, math.fsum(powers)) for unix_s, powers in samples if powers and None not in powers]
    spans = [(stop - start, (first + second) / 2) for (start, first), (stop, second) in pairwise(known)]
    longest_s = _GAP_FACTOR * statistics.median([span_s for span_s, _ in spans] or [0])
    spans = [span for span in spans if span[0] <= longest_s]
    length_s = math.fsum(span_s for span_s, _ in spans)
    return math.fsum(span_s * power_w for span_s, power_w in spans) / length_s if length_s > 0 else math.nan


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise PacelineError(f"{path}: cannot be read: {error} (remove it, or fix it)") from None
    return values if isinstance(values, dict) else {}
