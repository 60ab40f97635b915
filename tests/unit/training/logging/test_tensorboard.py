"""Event files, by the eyes of TensorBoard itself."""

from pathlib import Path

import pytest

from paceline.core.results import EvalReport, EvalResult
from paceline.core.run_dir import RunDir
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe
from paceline.training.logging.base import EvalRecord
from paceline.training.logging.build import build_sinks


def recipe(*words: str) -> Recipe:
    return load("digits", Patch.parse(["log.tensorboard=on", *words])).recipe


def judged(top1: float) -> EvalResult:
    return EvalResult(images=8, top1=top1, top5=1.0, loss=2.0, ece=0.125, mean_class_accuracy=top1)


def record(step: int, report: EvalReport) -> EvalRecord:
    return EvalRecord(step, step / 8, 8 * step, 1.5, report)


def test_tensorboards_own_reader_finds_averages_and_gap(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    asked = recipe("train.ema.decay=0.9", "train.eval_train=on")
    sinks = build_sinks(RunDir(tmp_path), asked, 0, [])
    sinks.evaluated(record(4, EvalReport(val=judged(0.5), ema=judged(0.625), train=judged(0.75))))
    sinks.close()
    events = reading.EventAccumulator(str(RunDir(tmp_path).tensorboard)).Reload()
    found = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    names = ("top1", "top5", "loss", "ece", "mean_class_accuracy")
    expected = {f"val/{name}": [getattr(judged(0.5), name)] for name in names}
    expected |= {f"ema/{name}": [getattr(judged(0.625), name)] for name in names}
    assert found == expected | {"train_eval/top1": [0.75], "train_eval/loss": [2.0], "gap": [0.25]}


def test_tensorboards_own_reader_finds_the_recipe_as_text(tmp_path: Path, plan) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    asked = recipe("optim.lr=0.25")
    sinks = build_sinks(RunDir(tmp_path), asked, 4, [])
    sinks.started(plan, 4)
    sinks.close()
    events = reading.EventAccumulator(str(RunDir(tmp_path).tensorboard)).Reload()
    (event,) = events.Tensors("recipe/text_summary")
    (text,) = event.tensor_proto.string_val
    lines = text.decode().splitlines()
    assert event.step == 4 and "      lr: 0.25" in lines and f"    recipe_hash: {asked.hash}" in lines
    assert all(line.startswith("    ") for line in lines)
