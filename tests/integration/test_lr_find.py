"""`paceline lr-find` and `tune --learn` with real runs: the same on two ranks, resumed, and as a user sees them."""

import json
import shutil
from pathlib import Path

import pytest

from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import LearnResult, LrFindResult
from paceline.recipe.load import Patch, load

SMALL = (
    *("synthetic", "model.width=0.1", "data.source.num_images=96", "data.source.num_val_images=37"),
    *("data.source.image_size=8", "data.batch_size=16", "parallel.threads=1", "data.workers=0"),
    *("log.tensorboard=off", "log.worst=0", "measure.telemetry=off"),
)
FIND = ("lr-find", *SMALL, "--steps", "40", "--from", "1e-5", "--to", "10", "--repeats", "2")
TEST = (
    *("train", *SMALL, "train.steps=14", "log.every=1st", "schedule.name=range_test", "schedule.start=1e-5"),
    *("optim.lr=300", "schedule.max_rise=1.5", "train.eval_every=off", "log.report=off", "--json"),
)


# High rates amplify the rounding of another batch size per rank, hence float64; BatchNorm must see all images.
IN_FP64 = (
    *(*FIND, "model.norm=sync_batch", "train.precision=fp64", "data.source.image_size=16", "data.batch_size=32"),
    *("data.source.num_images=128", "--json"),
)


@pytest.fixture(scope="module")
def one_rank(paceline_in, tmp_path_factory) -> dict:
    return paceline_in(tmp_path_factory.mktemp("one"))(*IN_FP64, "--ranks", "1", "--run-dir", "one").result


# In training, `test_exact.py` compares both strategies with one rank.
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_two_ranks_suggest_what_one_does(paceline, one_rank: dict, strategy: str) -> None:
    assert one_rank["suggestion"] is not None and one_rank["losses"][0] != one_rank["losses"][1]  # of another seed
    two = paceline(*IN_FP64, f"parallel.strategy={strategy}", "--ranks", "2", "--run-dir", strategy).result
    assert one_rank["suggestion"] == two["suggestion"]
    for losses, others in zip(one_rank["losses"], two["losses"], strict=True):
        assert losses[:25] == pytest.approx(others[:25], rel=1e-9)


@pytest.fixture(scope="module")
def found(paceline_in, tmp_path_factory):
    """Return the program in a folder with the finished range test `found`, and what that printed."""
    program = paceline_in(tmp_path_factory.mktemp("found"))
    completed = program(*FIND, "--run-dir", "found")
    assert completed.code == 0, completed.err
    return program, completed.out


def test_the_suggestion_is_that_of_the_recipe_before_it_is_scaled(found) -> None:
    """With a factor of 2 for the batch, half the rate is the same run."""
    program, _ = found
    plain = json.loads(ExperimentDir(program.folder / "found").result.read_text())
    scaling = ("optim.lr_scaling=linear", "optim.base_batch_size=8")
    args = [*FIND[:-6], "--from", "5e-6", "--to", "5", "--repeats", "2"]
    scaled = program(*args, *scaling, "--json", "--run-dir", "scaled").result
    assert scaled["losses"] == plain["losses"]
    assert scaled["suggestion"] == pytest.approx(plain["suggestion"] / 2, rel=0.3)  # rounded to a series


def test_an_interrupted_range_test_repeats_no_run(found) -> None:
    program, shown = found
    folder = ExperimentDir(program.folder / "again")
    shutil.copytree(program.folder / "found", folder.path)
    result = folder.read()
    assert isinstance(result, LrFindResult) and len(result.runs) == 2
    assert f"optim.lr={result.suggestion:g}" in shown and "<- suggestion" in shown
    page = folder.report.read_text(encoding="utf-8")
    assert f"suggestion {result.suggestion:g}" in page
    folder.result.unlink()  # as if killed in its last run
    shutil.rmtree(folder.path / result.runs[1])
    kept = (folder.path / result.runs[0] / "result.json").stat().st_mtime_ns
    again = program(*FIND, "--run-dir", "again", "--json").result
    assert (folder.path / result.runs[0] / "result.json").stat().st_mtime_ns == kept
    assert again["losses"] == json.loads(result.model_dump_json())["losses"]
    assert again["suggestion"] == result.suggestion


def test_a_range_test_that_becomes_nan_ends_there(paceline) -> None:
    """Without normalization, huge weights overflow. The loss of that step is not logged."""
    found = paceline(
        *("lr-find", *SMALL, "optim={name: adamw}", "model.norm=none", "--steps", "40", "--from", "1e-15"),
        *("--to", "1e30", "--repeats", "1", "--run-dir", "found", "--json"),
    ).result
    assert len(found["losses"][0]) < 40 and len(found["smoothed"]) == len(found["losses"][0])


@pytest.mark.parametrize("ranks", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_a_diverged_run_ends_alike_if_it_is_resumed(paceline, tmp_path: Path, cut, ranks: str) -> None:
    args = (*TEST, "checkpoint.every=2st", "checkpoint.keep=9", "--ranks", ranks)
    whole = paceline(*args, "--run-dir", "whole").result
    assert whole["status"] == "diverged" and 4 < whole["steps"] < 14
    cut(tmp_path / "whole", tmp_path / "cut", 4)
    resumed = paceline(*args, "--run-dir", "cut", "--resume").result
    assert (resumed["status"], resumed["steps"]) == ("diverged", whole["steps"])
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def test_the_range_must_rise(paceline) -> None:
    failed = paceline("lr-find", *SMALL, "--from", "1", "--to", "0.1", "--run-dir", "found")
    failed.assert_error("--from, --to: 1 to 0.1 does not rise")


LEARN = (
    *("tune", *SMALL, "train.epochs=0.9", "--learn", "--budget", "7.5", "--seeds", "2"),
    *("--search", "search.yaml", "--run-dir", "found", "--json"),
)


def learned(paceline) -> LearnResult:
    """Run a search of a dozen runs, which a busy machine needs more than the usual time for."""
    process = paceline.start(*LEARN)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    return LearnResult.model_validate_json(out)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_search_for_accuracy_that_is_killed_resumes_to_the_same_recipe(paceline, tmp_path: Path) -> None:
    (tmp_path / "search.yaml").write_text("optim.lr: {low: 0.001, high: 1, scale: log}\n")
    found = learned(paceline)
    folder = ExperimentDir(tmp_path / "found")
    assert found.spent <= 7.5 and found.best_patch[0].startswith("optim.lr=")
    assert found.best_value is not None and found.best_value.n == 2 and found.gain is not None
    better = list(found.best_patch) if found.gain.value > 0 else []
    expected = load(SMALL[0], Patch.parse([*SMALL[1:], "train.epochs=0.9", *better])).recipe
    assert load(str(folder.path / "tuned.yaml")).recipe == expected
    folder.result.unlink()
    lost = found.trials[-3:]
    for trial in lost:
        shutil.rmtree(folder.path / trial.run)
    kept = {trial.run: (folder.path / trial.run / "result.json").stat().st_mtime_ns for trial in found.trials[:-3]}
    resumed = learned(paceline)
    assert kept == {run: (folder.path / run / "result.json").stat().st_mtime_ns for run in kept}
    assert [(t.name, t.patch, t.value) for t in resumed.trials] == [(t.name, t.patch, t.value) for t in found.trials]
    assert resumed.sentence == found.sentence


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "3"], "--budget: 3 is less than the 9.1 full training runs"),
        (["--vary", "optim.lr=1,2"], "--vary: has no effect with --learn"),
        (["--repeats", "5"], "--repeats: has no effect with --learn"),
        (["train.eval_every=off"], "train.eval_every: off leaves no accuracy"),
    ],
)
def test_a_search_that_cannot_work_is_refused(paceline, words: list[str], message: str) -> None:
    paceline("tune", *SMALL, "--learn", *words).assert_error(message)


def test_options_of_learn_need_it(paceline) -> None:
    paceline("tune", *SMALL, "--seeds", "3").assert_error("--seeds: 3 has no effect")
    paceline("tune", *SMALL, "--budget", "2h").assert_error("--budget: '2h' is not a number of runs")
