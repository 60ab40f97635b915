"""Callbacks: called once per step, epoch and evaluation on rank 0, changing nothing, on resume and if they fail."""

import json
import shutil
from pathlib import Path

import pytest

CODE = """
import builtins
import json
import random

import numpy as np
import torch

from paceline.training.callbacks import Callback


class Log(Callback):
    def __init__(self, name="calls.jsonl", fail_at=None, error="ValueError"):
        self.name, self.fail_at, self.error = name, fail_at, getattr(builtins, error)

    def write(self, event, view):
        torch.manual_seed(1), torch.rand(3), np.random.seed(1), random.seed(1)  # which changes no training
        with (view.run_dir / self.name).open("a") as file:
            row = {"event": event, "step": view.step, "of": view.total_steps, "epoch": view.epoch, "lr": view.lr}
            file.write(json.dumps({**row, "loss": view.loss, "metrics": dict(view.metrics)}) + "\\n")
        if self.fail_at == view.step:
            raise self.error("no more\\nof this")

    def started(self, view):
        self.write("started", view)

    def step_ended(self, view):
        self.write("step", view)

    def epoch_ended(self, view):
        self.write("epoch", view)

    def evaluated(self, view):
        try:
            view.metrics["top1"] = 1.0
        except TypeError:
            self.write("evaluated", view)

    def finished(self, view):
        assert (view.run_dir / "result.json").is_file()
        self.write("finished", view)


class Half:
    def step_ended(self, view): ...
"""
TRAIN = ("train", "synthetic", "model.width=0.1", "data.source.num_images=60", "data.source.num_val_images=24",
         "data.batch_size=12", "data.augment=[pad_crop,flip]", "train.epochs=2", "log.every=2st",
         "checkpoint.every=1ep", "parallel.threads=1", "log.tensorboard=off", "log.report=off",
         "data.workers=0")  # fmt: skip
CALLBACK = "train.callbacks=[watching:Log]"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "watching.py").write_text(CODE)
    return {"PYTHONPATH": f"{tmp_path / 'lib'}:{Path(__file__).parents[2] / 'src'}"}


@pytest.mark.parametrize("ranks", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_a_callback_sees_every_step_epoch_and_evaluation_and_changes_nothing(
    paceline, tmp_path: Path, lines_of, environ: dict[str, str], ranks: str
) -> None:
    args = (*TRAIN, "--ranks", ranks)
    plain = paceline(*args, "--run-dir", "plain", "--json").result
    seen = paceline(*args, CALLBACK, "--run-dir", "seen", "--json", **environ).result
    assert seen["weights_sha256"] == plain["weights_sha256"]
    calls = lines_of(tmp_path / "seen" / "calls.jsonl")
    epoch = [("step", 1), ("step", 2), ("step", 3), ("step", 4), ("step", 5), ("epoch", 5), ("evaluated", 5)]
    second = [(event, step + 5) for event, step in epoch]
    assert [(each["event"], each["step"]) for each in calls] == [("started", 0), *epoch, *second, ("finished", 10)]
    assert all(each["of"] == 10 and each["epoch"] == each["step"] / 5 for each in calls)
    logged = {row["step"]: row for row in lines_of(tmp_path / "seen" / "steps.jsonl")}
    for each in calls[1:]:
        last = logged.get(each["step"] - each["step"] % 2)
        assert each["loss"] == (last and last["loss"])
    (first, last) = (each["metrics"] for each in calls if each["event"] == "evaluated")
    assert [first, last] == [
        {name: value for name, value in row.items() if value is not None}
        for row in lines_of(tmp_path / "seen" / "evals.jsonl")
    ]

    # Killed after the first epoch, and resumed.
    shutil.rmtree(tmp_path / "seen" / "checkpoints" / "step-00000010")
    (tmp_path / "seen" / "result.json").unlink()
    (tmp_path / "seen" / "calls.jsonl").unlink()
    paceline("train", "seen", "--ranks", ranks, "--resume", **environ).assert_error("train.callbacks", "--trust-code")
    resumed = paceline("train", "seen", "--ranks", ranks, "--resume", "--trust-code", "--json", **environ).result
    assert resumed["weights_sha256"] == plain["weights_sha256"]
    calls = lines_of(tmp_path / "seen" / "calls.jsonl")
    assert [(each["event"], each["step"]) for each in calls] == [("started", 5), *second, ("finished", 10)]


@pytest.mark.parametrize(("ranks", "error"), [("1", "ValueError"), ("2", "SystemExit")])
def test_an_exception_ends_the_run_on_all_ranks_in_one_line(
    paceline, tmp_path: Path, lines_of, environ: dict[str, str], ranks: str, error: str
) -> None:
    args = {"fail_at": 7, "error": error}
    callback = f"train.callbacks=[{json.dumps({'name': 'watching:Log', 'args': args})}]"
    failed = paceline(*TRAIN, callback, "--ranks", ranks, "--run-dir", "run", **environ)
    assert failed.code == 2
    (line,) = (line for line in failed.err.splitlines() if line.startswith("error: "))
    assert f"train.callbacks[0].name: watching:Log.step_ended raised {error}: no more of this at" in line
    assert "watching.py:22" in line and "Traceback" not in failed.err
    assert (tmp_path / "run" / "checkpoints" / "step-00000005").is_dir()  # of the first epoch, from which it resumes
    resumed = paceline(*TRAIN, "train.callbacks=[]", "--ranks", ranks, "--run-dir", "run", "--resume", "--json")
    assert resumed.result["steps"] == 10


def test_what_is_no_callback_is_refused_before_training(paceline, tmp_path: Path, environ: dict[str, str]) -> None:
    dry = (*TRAIN, "--dry-run")
    paceline(*dry, "train.callbacks=[watching:Half]", **environ).assert_error("train.callbacks[0].name", "Callback)")
    paceline(*dry, "train.callbacks=[watching:Lag]", **environ).assert_error("train.callbacks[0].name", "'Log'")
    named = "train.callbacks=[{name: 'watching:Log', args: {nmae: 1}}]"
    paceline(*dry, named, **environ).assert_error("train.callbacks[0].args.nmae", "'name'")
    (tmp_path / "recipe.yaml").write_text("extends: synthetic\ntrain: {callbacks: ['watching:Log']}\n")
    paceline("train", "recipe.yaml", **environ).assert_error("recipe.yaml:2", "--trust-code")
