"""`paceline cv`: each image is predicted once, an interrupted fold is resumed, tasks and ranks give the same result."""

import csv
import json
import shutil
from pathlib import Path

from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import CrossValidationResult
from paceline.lab.trial import write_recipe
from paceline.recipe.load import Patch, load

SMALL = ("digits", "model.width=0.1", "data.image_size=8", "data.workers=0", "train.epochs=2", "train.eval_every=1ep",
         "parallel.threads=1", "log.tensorboard=off", "log.report=off", "log.worst=0",
         "measure.telemetry=off")  # fmt: skip
CV = ("cv", *SMALL, "--folds", "2", "--run-dir", "found")


def read(tmp_path: Path) -> CrossValidationResult:
    result = ExperimentDir(tmp_path / "found").read()
    assert isinstance(result, CrossValidationResult)
    return result


def test_an_interrupted_cross_validation_is_resumed_to_the_same_result(paceline, tmp_path: Path) -> None:
    folder = ExperimentDir(tmp_path / "found")
    first = paceline(*CV, "--only", "0")
    assert first.code == 0 and "1 of 2 runs are left" in first.out and not folder.result.exists()
    shown = paceline(*CV)
    assert shown.code == 0, shown.err
    found = read(tmp_path)
    assert [(each.fold, each.seed) for each in found.runs] == [(0, 0), (1, 1)]
    assert {each.train_images + each.val_images for each in found.runs} == {1438}
    assert all(len(each.curve) == 2 and each.curve[-1][1] == each.value for each in found.runs)
    assert found.accuracy is not None and found.accuracy.n == 1438 and "corrected resampled t" in shown.out
    # Rounding apart, the mean over folds of equal size is the accuracy of all predictions.
    assert abs(found.value.value - found.accuracy.value) < 1e-9
    with folder.predictions.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["image"] for row in rows) == sorted(f"digits[{index}]" for index in range(1438))
    assert sum(row["true"] == row["predicted"] for row in rows) == round(1438 * found.accuracy.value)
    page = folder.report.read_text(encoding="utf-8")
    assert "Validation by epoch" in page and "Confusion matrix" in page

    # As if killed in the second epoch of the second fold.
    run = folder.path / found.runs[1].run
    weights = json.loads((run / "result.json").read_text())["weights_sha256"]
    folder.result.unlink()
    for name in ("result.json", "predictions.csv"):
        (run / name).unlink()
    *_, last = sorted((run / "checkpoints").iterdir())
    shutil.rmtree(last)
    kept = (folder.path / found.runs[0].run / "result.json").stat().st_mtime_ns
    assert paceline(*CV, "--json").code == 0
    assert (folder.path / found.runs[0].run / "result.json").stat().st_mtime_ns == kept
    assert json.loads((run / "result.json").read_text())["weights_sha256"] == weights
    assert [(each.value, each.curve) for each in read(tmp_path).runs] == [
        (each.value, each.curve) for each in found.runs
    ]
    assert folder.predictions.read_text().splitlines()[1:] == [",".join(row.values()) for row in rows]

    # A fold by itself is the run of the cross-validation, and ranks together predict what one does.
    split = ("data.split.folds=2", "data.split.fold=1", "log.predictions=on", "seed=1")
    assert paceline("train", *SMALL, *split, "--json").result["weights_sha256"] == weights
    shared = paceline("eval", str(run), "--predictions", "again.csv", "--ranks", "2", "--json").result
    assert shared["top1"] == found.runs[1].value
    of_ranks, of_run = ([line.split(",")[:3] for line in path.read_text().splitlines()]
                        for path in (tmp_path / "again.csv", run / "predictions.csv"))  # fmt: skip
    assert of_ranks == of_run
    test = paceline("eval", str(run), "data.split=off", "--json")
    assert test.result["images"] == 359 and "data.split" not in test.err
    assert "data.split: the run was trained on some" in paceline("eval", str(run), "data.split.fold=0", "--json").err


def test_what_cannot_work_is_refused(paceline, tmp_path: Path) -> None:
    for words, message in (
        (["data.split.fold=1"], "data.split.fold: 1 has no effect on cv"),
        (["checkpoint.every=off"], "checkpoint.every: off leaves no weights to evaluate (set checkpoint.every=1ep)"),
        (["--only", "0,2"], "--only: '2' is not one of 2 folds"),
        (["--leave-one-group-out"], "--folds: 2 has no effect with --leave-one-group-out"),
    ):
        paceline(*CV, *words).assert_error(message)
    paceline("cv", *SMALL, "--groups", "patient").assert_error("data.split.groups: 'patient' is not in digits")
    fold = load("digits", Patch.parse(["data.batch_size=3000", "data.split.folds=4", "data.split.fold=3"]))
    write_recipe(fold.recipe, tmp_path / "whole.yaml")
    (tmp_path / "sites.csv").write_text("\n".join(["site", *(f"s{number % 4}" for number in range(1438))]))
    grouped = ("cv", "whole.yaml", *SMALL[1:], "--groups", "site", "--groups-file", "sites.csv", "--run-dir", "sites")
    paceline(*grouped, "--folds", "2").assert_error("fold 0: data.batch_size: 3000 is more than the")
    (tmp_path / "sites.csv").write_text("\n".join(["site", *(f"s{number % 5}" for number in range(1438))]))
    paceline(*grouped, "--folds", "2").assert_error("--run-dir: sites holds something else (name a new folder)")
