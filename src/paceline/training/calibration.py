"""Temperature scaling: fit a temperature to the logits of a checkpoint, and keep it beside the checkpoint."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

from paceline.core.errors import DataError, PacelineError
from paceline.core.json_file import ResultModel, read_limited
from paceline.core.results import Calibration, EvalResult
from paceline.core.run_dir import RunDir
from paceline.training.checkpoint import weights_digest
from paceline.training.metrics import EvalCounts, predict_batch
from paceline.training.scores import ImageScores

_LIMITS: Final = (0.01, 100.0)
_DIGITS: Final = 6
"""Decimals of a temperature: fewer than the last bits of logits change, which depend on the size of a batch."""
_CHUNK: Final = 4096


class CheckpointTemperature(ResultModel):
    """The calibration of a checkpoint: SHA-256 of its weights, and the overrides of the evaluation."""

    weights: str
    overrides: tuple[str, ...]
    calibration: Calibration


_ENTRIES: Final = TypeAdapter(dict[str, CheckpointTemperature], config=ConfigDict(defer_build=True))


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the T > 0 that minimizes the mean cross-entropy of softmax(logits / T), from 0.01 to 100.

    `logits` are float [N, C] on the CPU, up to a constant per row, and `labels` int64 [N]. Guo et al. 2017 (arXiv
    1706.04599), section 4.2.
    """
    from scipy.optimize import brentq  # type: ignore[import-untyped]

    def slope(log_temperature: float) -> float:
        """Return the derivative of the loss by 1/T, which falls with T as the loss is convex in 1/T."""
        total = 0.0
        for rows, classes in zip(torch.split(logits, _CHUNK), torch.split(labels, _CHUNK), strict=True):
            rows = rows.double()
            expected = ((rows / math.exp(log_temperature)).softmax(dim=1) * rows).sum(dim=1)
            total += float((expected - rows.gather(1, classes[:, None])[:, 0]).sum())
        return total

    low, high = map(math.log, _LIMITS)
    if slope(low) <= 0:
        return _LIMITS[0]
    if slope(high) >= 0:
        return _LIMITS[1]
    return round(math.exp(brentq(slope, low, high, xtol=1e-10)), _DIGITS)


def calibrate(images: ImageScores, before: EvalResult) -> Calibration:
    """Fit a temperature to the logits of all images, and evaluate temperature scaling by two-fold cross-validation.

    Each half of the images, every other one, is evaluated at the temperature of the other half. `before` is the
    evaluation of the same images.
    """
    logits, labels, _ = images
    if not logits.isfinite().all():
        raise DataError("--calibrate: the model's logits are NaN or infinite (use another --checkpoint)")
    halves = [fit_temperature(logits[first::2], labels[first::2]) for first in (1, 0)]
    temperatures = torch.tensor(halves, dtype=torch.float64)[torch.arange(len(labels)) % 2]
    counts = EvalCounts.zeros(logits.shape[1], logits.device)
    for rows, classes, scale in zip(
        *(torch.split(each, _CHUNK) for each in (logits, labels, temperatures)), strict=True
    ):
        counts.add(predict_batch(rows.double() / scale[:, None], classes))
    after = counts.to_result()
    return Calibration(
        temperature=fit_temperature(logits, labels),
        images=len(labels),
        loss=before.loss,
        ece=before.ece,
        calibrated_loss=after.loss,
        calibrated_ece=after.ece,
    )


def write_temperature(rundir: RunDir, checkpoint: Path, calibration: Calibration, overrides: Sequence[str]) -> None:
    """Record the calibration of `checkpoint` in the run directory.

    Raise `DataError` if no temperature minimizes the loss, and `PacelineError` if the file cannot be read or written.
    """
    if calibration.temperature in _LIMITS:
        reason = "is correct for all" if calibration.temperature == _LIMITS[0] else "is no better than chance on the"
        raise DataError(
            f"--calibrate: no temperature minimizes the loss, as the model {reason} {calibration.images:,} images "
            "(name others by data.source.*, or use another --checkpoint)"
        )
    entry = CheckpointTemperature(
        weights=weights_digest(checkpoint), overrides=tuple(overrides), calibration=calibration
    )
    entries = _read_entries(rundir) | {checkpoint.name: entry}
    rundir.write_json(rundir.temperatures.name, _ENTRIES.dump_python(entries, mode="json"))


def read_temperature(rundir: RunDir, checkpoint: Path) -> float | None:
    """Return the temperature of `checkpoint`, or None if it was not calibrated with these weights.

    Raise `PacelineError` for a damaged file.
    """
    entry = _read_entries(rundir).get(checkpoint.name)
    return entry.calibration.temperature if entry and entry.weights == weights_digest(checkpoint) else None


def _read_entries(rundir: RunDir) -> dict[str, CheckpointTemperature]:
    try:
        return _ENTRIES.validate_json(read_limited(rundir.temperatures))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        fix = "remove it, and run eval with --calibrate"
        raise PacelineError(f"{rundir.temperatures}: cannot be read: {reason} ({fix})") from None
