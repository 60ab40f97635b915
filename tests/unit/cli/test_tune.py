"""`paceline tune` writes the winning recipe, prints its trials, and refuses invalid arguments."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import tune as under_test
from paceline.cli.options import TuneOptions
from paceline.core.errors import RecipeError
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import TuneResult
from paceline.core.results import RunResult, ThroughputResult, TimeResult
from paceline.core.run_dir import RunDir
from paceline.lab.trial import Trial, TrialOutcome, apply_patch
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe


class FakeRunner:
    """Runs nothing: bfloat16 is 1.5 times as fast, and two pieces have no room."""

    def __init__(self, recipe: Recipe, recipe_file: Path, ranks: int, *, get_folder: Any, **others: Any) -> None:
        self.recipe, self.get_folder = recipe, get_folder
        assert load(str(recipe_file)).recipe == recipe

    def run(self, trial: Trial, repeat: int) -> TrialOutcome:
        """Return a made-up result."""
        recipe = apply_patch(self.recipe, trial.patch)
        rundir = RunDir(self.get_folder(trial, repeat))
        if recipe.train.accumulate == 2:
            return TrialOutcome(trial, repeat, rundir, None, "torch.OutOfMemoryError: CUDA out of memory", 1)
        rate = 150.0 if recipe.train.precision == "bf16" else 100.0
        result = RunResult(
            status="completed",
            recipe_hash=recipe.hash,
            world_size=1,
            epochs=1.0,
            steps=20,
            images_seen=100,
            eval=None,
            best=None,
            throughput=ThroughputResult(images_per_s=rate, spread=(rate, rate), n=3, excluded_s=0),
            time=TimeResult(wall_s=4.0, startup_s=1.0, train_s=2.0, eval_s=0, checkpoint_s=0, to_target_s=None),
            stages={},
            verdict={"bottleneck": "compute-bound", "evidence": "made up", "ceiling": "", "try": ""},
            lr="0.1",
            weights_sha256="ab",
            provenance={"device": "cpu", "logical_cores": 4},
        )
        rundir.create()
        rundir.write_result(result)
        return TrialOutcome(trial, repeat, rundir, result)


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return a function that tunes digits in `tmp_path/tune`, with runs that are made up."""
    monkeypatch.setattr("paceline.cli.experiment.TrialRunner", FakeRunner)
    monkeypatch.chdir(tmp_path)

    def of(*words: str, **options: Any) -> int:
        values = {
            "steps": 20,
            "repeats": 2,
            "vary": ["train.precision=fp32,bf16", "train.accumulate=1,2"],
        }
        return under_test.tune(
            TuneOptions(args=["digits", *words], ranks="1", run_dir=tmp_path / "tune", **{**values, **options})
        )

    return of


def test_the_tuned_recipe_is_the_request_with_the_winning_settings(tune, tmp_path: Path) -> None:
    assert tune("seed=3") == 0
    path = tmp_path / "tune" / "tuned.yaml"
    assert load(str(path)).recipe == load("digits", Patch.parse(["seed=3", "train.precision=bf16"])).recipe
    assert "# train.precision=bf16: 1.500x" in path.read_text(encoding="utf-8")


def test_a_recipe_with_published_weights_is_tuned_at_their_settings(tune, tmp_path: Path) -> None:
    words = ("model.name=timm:test_vit", "model.weights=default", "model.width=1", "data.source={name: synthetic}")
    assert tune(*words) == 0
    patch = Patch.parse([*words, "train.precision=bf16"])
    assert load(str(tmp_path / "tune" / "tuned.yaml")).recipe == load("digits", patch).recipe


def test_the_warning_that_slurm_sends_interrupts_a_search(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    class Warned(FakeRunner):
        def run(self, trial: Trial, repeat: int) -> TrialOutcome:
            signal.raise_signal(signal.SIGUSR1)
            return super().run(trial, repeat)

    monkeypatch.setattr("paceline.cli.experiment.TrialRunner", Warned)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt):
            tune()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_all_that_was_found_is_written(tune, tmp_path: Path) -> None:
    tune()
    folder = ExperimentDir(tmp_path / "tune")
    found = folder.read()
    assert isinstance(found, TuneResult)
    assert (found.gain and found.gain.value, found.grid, found.trials) == (pytest.approx(1.5), 4, 7)
    assert found.best_patch == ("train.precision=bf16",)
    assert [(tried.name, tried.status) for tried in found.tried] == [
        ("train.precision=bf16", "won"),
        ("train.accumulate=2", "no_room"),
    ]
    assert found.wall_s == 6 * 4.0  # of the run that had no room nothing is known
    assert all((folder.path / run).is_dir() for tried in found.tried for run in tried.runs)
    assert folder.table.exists() and folder.markdown.exists() and folder.report.exists()


def test_the_trials_and_the_training_command_are_printed(tune, capsys: pytest.CaptureFixture[str]) -> None:
    tune()
    printed = capsys.readouterr().out
    assert "out of memory" in printed
    assert "as fast as the recipe was" in printed and "1.50x" in printed
    assert "train.precision=bf16" in printed
    assert "paceline train" in printed and "tuned.yaml" in printed


def test_with_json_only_the_result_is_on_stdout(tune, capsys: pytest.CaptureFixture[str]) -> None:
    tune(as_json=True)
    written = capsys.readouterr()
    assert TuneResult.model_validate(json.loads(written.out)).recipe == "digits"
    assert "the recipe: 100 images/s" in written.err


def test_a_search_that_has_ended_is_shown_and_not_made_again(
    tune, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tune()
    capsys.readouterr()
    monkeypatch.setattr("paceline.cli.experiment.TrialRunner", None)
    assert tune() == 0
    assert "1.50x" in capsys.readouterr().out


def test_the_tuned_recipe_is_the_recipe_if_nothing_is_faster(tune, tmp_path: Path) -> None:
    tune(vary=["train.accumulate=2"])
    assert load(str(tmp_path / "tune" / "tuned.yaml")).recipe == load("digits").recipe


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["train.steps=5"], {}, "train.steps: 5 has no effect"),
        (["measure.clock=off"], {}, "measure.clock: off leaves nothing"),
        ([], {"budget": "5"}, "--budget: 5 is less than the 6 runs"),
        ([], {"vary": ["data.batch_size=64"]}, "--allow-batch"),
    ],
)
def test_invalid_arguments_are_refused_before_writing(
    tune, tmp_path: Path, words: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        tune(*words, **options)
    assert not (tmp_path / "tune").exists()


def test_ranks_that_others_have_started_are_refused(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(RecipeError, match="starts its own ranks"):
        tune()
