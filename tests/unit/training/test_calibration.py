"""Temperature scaling: the temperature is an independent optimizer's, and belongs to the weights it was fitted to."""

import json
from pathlib import Path

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn import functional

from paceline.core.errors import DataError, PacelineError
from paceline.core.results import EvalResult
from paceline.core.run_dir import RunDir
from paceline.training.calibration import calibrate, fit_temperature, read_temperature, write_temperature
from paceline.training.checkpoint import CheckpointStorage, KeepPolicy, Snapshot
from paceline.training.scores import ImageScores

BEFORE = EvalResult(images=500, top1=0.5, top5=0.9, loss=2.0, ece=0.3)


def overconfident_logits(number: int = 500, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits float32 [N, 7] three times too large for their labels, which are drawn from the right ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(number, 7, generator=generator, dtype=torch.float64) * 1.5
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator)[:, 0]
    return (3 * logits).log_softmax(dim=1).float(), labels


def loss_at(temperature: float, logits: Tensor, labels: Tensor) -> float:
    return float(functional.cross_entropy(logits.double() / temperature, labels))


def reference_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the minimum of the loss that scipy finds without its derivative."""
    found = minimize_scalar(
        loss_at, bounds=(0.01, 100), args=(logits, labels), method="bounded", options={"xatol": 1e-9}
    )
    return float(found.x)


@pytest.mark.parametrize("number", [500, 5000])
def test_the_temperature_minimizes_the_loss_as_an_independent_optimizer_does(number: int) -> None:
    logits, labels = overconfident_logits(number)
    temperature = fit_temperature(logits, labels)
    assert temperature == pytest.approx(reference_temperature(logits, labels), abs=2e-6)
    assert temperature == pytest.approx(3, rel=0.2)
    assert fit_temperature(logits + 5, labels) == pytest.approx(temperature, abs=2e-6)  # a constant changes nothing


def test_each_half_is_evaluated_at_the_temperature_of_the_other() -> None:
    logits, labels = overconfident_logits()
    found = calibrate(ImageScores(logits, labels), BEFORE)
    halves = [(logits[first::2], labels[first::2]) for first in (0, 1)]
    fitted = [reference_temperature(*half) for half in halves]
    assert abs(fitted[0] - fitted[1]) > 1e-3
    losses = [loss_at(fitted[1], *halves[0]), loss_at(fitted[0], *halves[1])]
    assert found.calibrated_loss == pytest.approx(sum(losses) / 2, abs=1e-6)
    assert (found.loss, found.ece, found.images) == (2.0, 0.3, 500)
    assert found.calibrated_ece is not None and found.calibrated_ece < 0.1
    assert found.temperature == pytest.approx(reference_temperature(logits, labels), abs=2e-6)


def write_checkpoint(run: Path, step: int, value: float) -> Path:
    run.mkdir(exist_ok=True)
    storage = CheckpointStorage(run / "checkpoints", KeepPolicy(9))
    storage.save(step, step, Snapshot({"model": {"weight": torch.full((3,), value)}, "optimizer": {}}, {}))
    return run / "checkpoints" / f"step-{step:08d}"


def test_a_temperature_belongs_to_the_weights_it_was_fitted_to(tmp_path: Path) -> None:
    run, found = RunDir(tmp_path), calibrate(ImageScores(*overconfident_logits()), BEFORE)
    one, other = write_checkpoint(tmp_path / "a", 4, 1.0), write_checkpoint(tmp_path / "b", 4, 2.0)
    eight = write_checkpoint(tmp_path / "a", 8, 2.0)
    assert read_temperature(run, one) is None
    write_temperature(run, one, found, ["data.eval_crop=1"])
    assert read_temperature(run, one) == found.temperature
    assert read_temperature(run, eight) is None
    assert read_temperature(run, other) is None  # the same step of other weights
    write_temperature(run, eight, found.model_copy(update={"temperature": 2.0}), [])
    assert (read_temperature(run, one), read_temperature(run, eight)) == (found.temperature, 2.0)
    assert json.loads(run.temperatures.read_text())["step-00000004"]["overrides"] == ["data.eval_crop=1"]


@pytest.mark.parametrize(("right", "reason"), [(True, "correct for all 500"), (False, "no better than chance")])
def test_without_a_minimum_there_is_no_temperature(tmp_path: Path, right: bool, reason: str) -> None:
    logits, _ = overconfident_logits()
    labels = logits.argmax(dim=1) if right else logits.argmin(dim=1)
    found = calibrate(ImageScores(logits, labels), BEFORE)
    with pytest.raises(DataError, match=f"--calibrate: .*{reason}.*data.source"):
        write_temperature(RunDir(tmp_path), tmp_path, found, [])
    assert not RunDir(tmp_path).temperatures.exists()


def test_logits_that_are_no_numbers_are_refused() -> None:
    logits, labels = overconfident_logits()
    logits[3, 1] = torch.nan
    with pytest.raises(DataError, match=r"--calibrate: .*NaN.*--checkpoint"):
        calibrate(ImageScores(logits, labels), BEFORE)


@pytest.mark.parametrize("text", ["{", '{"step-00000004": {"temperature": 0}}'])
def test_a_damaged_file_is_named_with_a_fix(tmp_path: Path, text: str) -> None:
    RunDir(tmp_path).temperatures.write_text(text)
    with pytest.raises(PacelineError, match=r"temperatures.json: .*remove it.*--calibrate"):
        read_temperature(RunDir(tmp_path), write_checkpoint(tmp_path, 4, 1.0))
