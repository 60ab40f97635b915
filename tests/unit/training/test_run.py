"""Sinks receive each kind of end of a run; errors before the first step."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from paceline.core.errors import DataError, RecipeError
from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.lab.trial import apply_patch
from paceline.recipe.load import Patch, load
from paceline.training.eval_run import evaluate
from paceline.training.process import Invocation
from paceline.training.run import run

WORDS = (
    *("data.source.num_images=16", "data.source.num_val_images=8", "data.source.image_size=8", "data.batch_size=8"),
    *("model.width=0.1", "train.epochs=1", "parallel.device=cpu", "parallel.threads=1", "log.tensorboard=off"),
    *("data.workers=0", "checkpoint.every=off", "measure.telemetry=off"),
)


class RecordingSink:
    """Note which calls come."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def started(self, plan, step) -> None:
        self.calls.append("started")

    def step(self, record) -> None:
        self.calls.append("step")

    def evaluated(self, record) -> None:
        self.calls.append("evaluated")

    def warned(self, message) -> None:
        self.calls.append("warned")

    def finished(self, result) -> None:
        self.calls.append(result.status)

    def close(self) -> None:
        self.calls.append("close")


def train(folder: Path, sink: RecordingSink, *overrides: str) -> None:
    recipe = load("synthetic", Patch.parse([*WORDS, *overrides])).recipe
    run(recipe, World.single(), RunDir(folder / "run"), invocation=Invocation(listeners=[sink]))


def test_a_finished_run_sends_its_result_and_closes_the_sinks(tmp_path: Path) -> None:
    sink = RecordingSink()
    train(tmp_path, sink)
    assert sink.calls[0] == "started" and sink.calls[-2:] == ["completed", "close"]
    assert sink.calls.count("close") == 1


def test_a_run_that_fails_in_a_step_closes_the_sinks_without_a_result(tmp_path: Path, monkeypatch) -> None:
    def fail(self, state):
        raise ZeroDivisionError

    monkeypatch.setattr("paceline.training.trainer.Trainer.fit", fail)
    sink = RecordingSink()
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, sink)
    assert sink.calls == ["started", "close"]


def test_a_run_that_fails_before_its_first_step_closes_the_sinks(tmp_path: Path, monkeypatch) -> None:
    def fail(*overrides):
        raise OSError("No space left on device")

    monkeypatch.setattr("paceline.training.components.build_sample_trace", fail)
    sink = RecordingSink()
    with pytest.raises(OSError, match="No space"):
        train(tmp_path, sink)
    assert sink.calls == ["started", "close"]


def test_a_tracker_that_is_not_installed_is_refused_before_the_data_is_read(tmp_path: Path, monkeypatch) -> None:
    def fail(*overrides):
        raise AssertionError("read")

    monkeypatch.setattr("paceline.training.run.read_run_data", fail)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(RecipeError, match=r"log.sinks\[0\]: mlflow is not installed"):
        train(tmp_path, RecordingSink(), "log.sinks=[mlflow]")


def test_where_a_run_is_compiled_each_size_of_images_that_is_to_come_is_compiled_ahead(
    tmp_path: Path, monkeypatch
) -> None:
    """Else steps that are counted would hold it."""
    sizes, first = [], []

    def compiled(replica, mode, num_sizes):
        assert (mode, num_sizes) == ("default", 2)
        return replica

    def rehearsed(model, replica, place, precision, plan, step):
        first.append(step)
        sizes.append(plan.train_size(step))

    monkeypatch.setattr("paceline.training.components.compile_model", compiled)
    monkeypatch.setattr("paceline.training.components.warmup_pass", rehearsed)
    small = ("data.progressive={start_size: 4, multiple: 4, begin: 0%, end: 50%}", "train.epochs=4")
    train(tmp_path, RecordingSink(), "train.compile=default", "model.width=0.25", *small)
    assert (sizes, first[0]) == ([4, 8], 0)


def test_a_run_that_is_never_evaluated_needs_no_validation_images(tmp_path: Path) -> None:
    rows = ["path,label"]
    for number in range(8):
        Image.new("RGB", (8, 8), (30 * number, 0, 0)).save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,{number % 2}")
    (tmp_path / "train.csv").write_text("\n".join(rows))
    source = f"data.source={{name: manifest, train: {tmp_path / 'train.csv'}}}"
    overrides = ["data.image_size=8", "data.batch_size=8", "model.width=0.1", "train={epochs: 1, eval_every: 'off'}"]
    overrides += ["parallel.device=cpu", "data.workers=0", "data.augment=[]", "log.report=off"]
    recipe = load("digits", Patch.parse([source, *overrides])).recipe
    rundir = RunDir(tmp_path / "run")
    result = run(recipe, World.single(), rundir, invocation=Invocation())
    assert (result.status, result.steps, result.eval) == ("completed", 1, None)
    (checkpoint,) = rundir.checkpoints.glob("step-*")
    with pytest.raises(DataError, match=r"^data\.source: there are no validation images to evaluate on \(name some"):
        evaluate(recipe, World.single(), checkpoint, run_recipe=recipe, print_line=print)


def test_samples_of_ranks_that_a_resumed_run_lacks_are_cut_like_its_own(tmp_path: Path) -> None:
    """A killed attempt of two ranks leaves rows after the checkpoint that one rank goes on from."""
    rundir = RunDir(tmp_path / "run")
    train(tmp_path, RecordingSink(), "log.samples=true", "train.epochs=auto", "train.steps=2", "checkpoint.every=1st")
    (rundir.path / "result.json").unlink()
    rows = "".join(json.dumps({"step": step, "samples": [step], "crc32": [0]}) + "\n" for step in range(7))
    for rank in (0, 1, 12):
        rundir.samples(rank).write_text(rows)
    recipe = load(str(rundir.path)).recipe
    run(recipe, World.single(), rundir, resume=True, invocation=Invocation())
    for rank in (0, 1, 12):
        kept = [json.loads(line)["step"] for line in rundir.samples(rank).read_text().splitlines()]
        assert kept == [0, 1]
    rundir.samples(12).write_text(json.dumps({"step": 5, "samples": [5], "crc32": [0]}) + "\n")
    (rundir.path / "result.json").unlink()
    # A preset's batch per rank, which is another batch on another number of ranks: the run keeps the one it has.
    recipe = apply_patch(recipe, Patch((("data.rank_batch_size", 2 * recipe.data.global_batch_size),)))
    run(recipe, World.single(), rundir, resume=True, invocation=Invocation())
    assert [path.name for path in rundir.all_samples()] == ["steps.rank0.jsonl", "steps.rank1.jsonl"]
