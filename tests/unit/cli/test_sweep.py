"""`paceline profile --vary` runs each value in turns, shows a row for each, and leaves tables and a page."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.options import ProfileOptions
from paceline.cli.profile import profile
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import SweepResult
from paceline.core.results import RunResult, ThroughputResult, TimeResult
from paceline.core.run_dir import RunDir
from paceline.lab.trial import Trial, TrialOutcome, apply_patch
from paceline.recipe.load import load
from paceline.recipe.schema import Recipe


class FakeRunner:
    """Runs nothing: images/s are three times the batch, a batch of 256 has no room."""

    ran: list[tuple[str, int]]

    def __init__(self, recipe: Recipe, recipe_file: Path, ranks: int, *, get_folder: Any, **others: Any) -> None:
        self.recipe, self.get_folder = recipe, get_folder
        assert load(str(recipe_file)).recipe == recipe

    def run(self, trial: Trial, repeat: int) -> TrialOutcome:
        """Return a made-up result."""
        type(self).ran.append((trial.name, repeat))
        recipe = apply_patch(self.recipe, trial.patch)
        batch, rundir = int(recipe.data.batch_size), RunDir(self.get_folder(trial, repeat))
        if batch == 256:
            return TrialOutcome(trial, repeat, rundir, None, "torch.OutOfMemoryError: CUDA out of memory", 1)
        rate = 3.0 * batch + repeat
        found = RunResult(
            status="completed",
            recipe_hash=recipe.hash,
            world_size=1,
            epochs=20 * batch / 1280,
            steps=20,
            images_seen=20 * batch,
            eval=None,
            best=None,
            throughput=ThroughputResult(images_per_s=rate, spread=(rate, rate), n=3, excluded_s=0),
            time=TimeResult(wall_s=4.0, startup_s=1.0, train_s=2.0, eval_s=0, checkpoint_s=0, to_target_s=None),
            stages={},
            verdict={"bottleneck": "compute-bound", "evidence": "", "ceiling": "", "try": ""},
            lr="0.1",
            weights_sha256="ab",
            provenance={"device": "cpu"},
        )
        return TrialOutcome(trial, repeat, rundir, found)


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return a function that sweeps digits in `tmp_path/sweep`, with runs that are made up."""
    FakeRunner.ran = []
    monkeypatch.setattr("paceline.cli.experiment.TrialRunner", FakeRunner)
    monkeypatch.chdir(tmp_path)

    def of(varied: str, repeats: int = 2, *, as_json: bool = False) -> int:
        folder = tmp_path / "sweep"
        options = ProfileOptions(
            args=["digits"], ranks="1", run_dir=folder, steps=10, repeats=repeats, vary=[varied], as_json=as_json
        )
        return profile(options)

    return of


def test_each_value_is_run_in_turns_and_has_a_row(sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("data.batch_size=64,256,128") == 0
    names = [f"data.batch_size={size}" for size in (64, 256, 128)]
    back = [name for name in reversed(names) if "256" not in name]  # what has failed is not run again
    assert FakeRunner.ran == [*((name, 1) for name in names), *((name, 2) for name in back)]
    out = capsys.readouterr().out
    assert "speed over data.batch_size · recipe digits" in out and "128 is the fastest, 386 images/s." in out
    folder = ExperimentDir(tmp_path / "sweep")
    found = folder.read()
    assert isinstance(found, SweepResult)
    assert [(each.value, each.is_fastest, bool(each.error)) for each in found.points] == [
        ("64", False, False), ("256", False, True), ("128", True, False),
    ]  # fmt: skip
    assert [each.epoch_s for each in found.points] == pytest.approx([1280 / 193.5, None, 1280 / 385.5])
    assert (
        "| data.batch_size | images/s, lowest to highest |" in folder.markdown.read_text()
        and "Profile over a setting" in (folder.report.read_text())
    )
    ran = len(FakeRunner.ran)
    assert sweep("data.batch_size=64,256,128", as_json=True) == 0  # it has ended, so nothing is run again
    assert len(FakeRunner.ran) == ran
    assert json.loads(capsys.readouterr().out)["fastest"] == "128"


def test_the_first_error_is_raised_if_nothing_was_measured(sweep, tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="out of memory"):
        sweep("data.batch_size=256")
    assert not ExperimentDir(tmp_path / "sweep").result.exists()


@pytest.mark.parametrize("option", ["trace", "nvtx"])
def test_tracing_is_refused_beside_vary(option: str) -> None:
    with pytest.raises(RecipeError, match=f"^--{option}: slows down the runs that --vary compares"):
        profile(ProfileOptions(args=["digits"], vary=["data.workers=0,1"], **{option: True}))
