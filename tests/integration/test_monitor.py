"""Metrics, losses and early stops on two ranks: as on one, resumed as uninterrupted, and as a user sees them."""

import json
import os
from pathlib import Path

import pytest

ARGS = (
    *("train", "synthetic", "model.width=0.1", "data.source.num_images=96", "data.source.num_val_images=37"),
    *("data.source.image_size=8", "data.batch_size=12", "train.steps=10", "train.eval_every=2st", "optim.lr=0.01"),
    *("checkpoint.every=2st", "checkpoint.keep=9", "parallel.threads=1", "log.tensorboard=off", "log.every=1st"),
    *("data.workers=0", "log.report=off"),
)
METRICS = """
def wrong(scores, labels):
    return float((scores.argmax(1) != labels).double().mean())


def constant(scores, labels):
    return 0.5


def broken(scores, labels):
    raise KeyError("weights")


wrong.minimize = True
"""
TIMES = ("trained_s", "train_s", "epoch_s", "images_per_s")


def evaluations(path: Path) -> list[dict]:
    rows = [json.loads(line) for line in (path / "evals.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def test_one_rank_evaluates_what_two_do(paceline, tmp_path: Path) -> None:
    (tmp_path / "own_metric.py").write_text(METRICS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    paceline(*ARGS, "train.loss=bce", "--run-dir", "run", "--json").result  # noqa: B018
    asked = ("eval", "run", "--metrics", "f1,top3,auroc,weighted_ap,own_metric:wrong", "--classes", "--json")
    one, two = (paceline(*asked, "--ranks", ranks, PYTHONPATH=path).result for ranks in "12")
    assert one["metrics"].keys() == {"f1", "top3", "auroc", "weighted_ap", "own_metric:wrong"}
    # A batch of another size rounds differently.
    assert two["metrics"] == pytest.approx(one["metrics"], abs=1e-6)
    assert one["metrics"]["own_metric:wrong"] == pytest.approx(1 - one["top1"])
    assert [each["auroc"] for each in two["classes"]] == pytest.approx([each["auroc"] for each in one["classes"]])
    assert {"predicted", "precision", "f1", "ap"} <= one["classes"][0].keys()
    text = paceline(*asked[:-1], PYTHONPATH=path).out
    assert f"AUROC {one['metrics']['auroc']:.4f}" in text and "precision" in text


@pytest.mark.parametrize("loss", [pytest.param("bce", marks=pytest.mark.long), "{name: focal, activation: sigmoid}"])
def test_patience_on_two_ranks_resumes_to_the_same_end(paceline, tmp_path: Path, cut, loss: str) -> None:
    (tmp_path / "own_metric.py").write_text(METRICS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    args = (*ARGS, f"train.loss={loss}", "train.metrics=[auroc,f1]", "train.monitor=own_metric:constant")
    args = (*args, "train.patience=3", "schedule.name=plateau", "schedule.patience=1", "--ranks", "2", "--json")
    whole = paceline(*args, "--run-dir", "whole", PYTHONPATH=path).result
    assert (whole["status"], whole["steps"], whole["best_step"]) == ("patience_reached", 8, 2)
    cut(tmp_path / "whole", tmp_path / "cut", 4)
    resumed = paceline(*args, "--run-dir", "cut", "--resume", PYTHONPATH=path).result
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert evaluations(tmp_path / "cut") == evaluations(tmp_path / "whole") and resumed["best"] == whole["best"]


def test_time_on_two_ranks_ends_a_run_that_resumes_to_the_same_end(paceline, tmp_path: Path) -> None:
    args = (*ARGS, "train.loss=focal", "train.patience=9", "--ranks", "2", "--json")
    whole = paceline(*args, "--run-dir", "whole").result
    limited = paceline(*args, "--run-dir", "cut", "train.max_time=0.01s").result
    # A request of rank 0 takes effect one step later on all ranks.
    assert (limited["status"], limited["steps"], limited["eval"]["images"]) == ("time_reached", 2, 37)
    shown = paceline("report", "cut", "--format", "md").out
    assert "time reached" in shown
    resumed = paceline(*args, "--run-dir", "cut", "--resume", "train.max_time=1h").result
    assert (resumed["status"], resumed["weights_sha256"]) == ("completed", whole["weights_sha256"])
    assert evaluations(tmp_path / "cut") == evaluations(tmp_path / "whole")


def test_a_run_by_another_metric_says_so(paceline, tmp_path: Path) -> None:
    args = (*ARGS, "train.monitor=auroc", "optim.lr=0.3", "--run-dir", "run", "--ranks", "1")
    completed = paceline(*args)
    assert completed.code == 0, completed.err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    last = f"AUROC {result['eval']['metrics']['auroc']:.4f}"
    assert last in completed.out and result["monitor"] == "auroc"
    assert "AUROC" in paceline("report", "run", "--format", "md").out


def test_code_of_a_file_needs_consent(paceline, tmp_path: Path) -> None:
    (tmp_path / "own_metric.py").write_text(METRICS)
    for field in ("metrics: [own_metric:wrong]", "monitor: own_metric:wrong", "loss: own_metric:wrong"):
        (tmp_path / "recipe.yaml").write_text(f"extends: synthetic\ntrain:\n  {field}\n")
        paceline("train", "recipe.yaml").assert_error(
            "recipe.yaml:3: train.", "own_metric:wrong is custom code", "--trust-code"
        )


def test_a_metric_that_raises_on_rank_0_ends_all_ranks_with_one_line(paceline, tmp_path: Path) -> None:
    (tmp_path / "own_metric.py").write_text(METRICS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    completed = paceline(
        *ARGS, "train.metrics=[own_metric:broken]", "--ranks", "2", "--run-dir", "run", PYTHONPATH=path
    )
    (line,) = [each for each in completed.err.splitlines() if "error: " in each]
    assert completed.code == 2 and "own_metric:broken raised KeyError: 'weights' at " in line
