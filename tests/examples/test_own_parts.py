"""The plugin examples run unchanged, and their runs can be read, resumed and refused."""

import hashlib
import json
import os
import re
from pathlib import Path

import pytest

SCRIPT = """
import os
import shutil

import numpy as np
import paceline
import torch

WORDS = ["data.image_size=8", "data.batch_size=32", "model.width=0.125", "parallel.device=cpu", "log.report=off"]
WORDS += ["train.steps=6", "data.augment=[]", "schedule={name: constant}", "checkpoint.every=3st", "checkpoint.keep=9"]
WORDS += ["optim={name: 'mine:Counting', lr: 0.1}"]


def blobs(split):
    draws = np.random.default_rng(0 if split == "train" else 1)
    labels = np.arange(64) % 2
    images = draws.integers(0, 128, (64, 8, 8)) + 100 * labels[:, None, None]
    return images.astype(np.uint8), labels, ["dark", "bright"]


class Counting(torch.optim.Optimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            for each in group["params"]:
                self.state[each]["step"] = self.state[each].get("step", 0) + 1
                each.sub_(each.grad, alpha=group["lr"] / (group["k"] + self.state[each]["step"]))


if __name__ == "__main__":
    whole = paceline.train("digits", *WORDS, source=blobs, run_dir="halves")
    print(whole.status, whole.steps, whole.weights_sha256)
    shutil.rmtree("halves/checkpoints/step-00000006")
    os.remove("halves/result.json")
    again = paceline.train("halves", resume=True, trust_code=True)
    print(again.status, again.steps, again.weights_sha256)
    assert paceline.train("halves", resume=True, trust_code=True).weights_sha256 == again.weights_sha256
    print("returned", again.run_dir, whole.run_dir)
"""
EXAMPLES = Path(__file__).parents[2] / "examples"
ON_PATH = {"PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])}


def run(forking, folder: Path, *args: str) -> str:
    process = forking.start([*args], folder, {**os.environ, "COLUMNS": "120"})
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def result_of(folder: Path) -> tuple[Path, dict]:
    (path,) = folder.glob("runs/*/result.json")
    return path.parent, json.loads(path.read_text())


@pytest.fixture(scope="module")
def own_model_run(forking, tmp_path_factory) -> tuple[str, Path]:
    """Return the output of `own_model.py`, and its run."""
    folder = tmp_path_factory.mktemp("own_model")
    out = run(forking, folder, str(EXAMPLES / "own_model.py"))
    return out, result_of(folder)[0]


def test_a_custom_model_trains_and_its_result_is_printed(own_model_run) -> None:
    out, rundir = own_model_run
    result = json.loads((rundir / "result.json").read_text())
    assert result["status"] == "completed" and result["eval"]["images"] == 359
    assert result["eval"]["top1"] > 0.8  # guessing is correct once in ten times
    assert re.search(r"^top1 (\S+)% of 359 images", out, re.MULTILINE)[1] == f"{100 * result['eval']['top1']:.1f}"
    assert "name: own_model:Pyramid" in (rundir / "recipe.yaml").read_text()


def test_a_run_of_a_custom_model_is_evaluated_with_its_module(own_model_run, paceline) -> None:
    _, rundir = own_model_run
    before = json.loads((rundir / "result.json").read_text())["eval"]
    second = paceline("eval", str(rundir), "--trust-code", "--json", **ON_PATH).result
    assert second["top1"] == before["top1"]


def test_a_run_of_a_custom_model_is_resumed_only_with_trust_code(own_model_run, paceline) -> None:
    _, rundir = own_model_run
    paceline("train", str(rundir), "--resume", **ON_PATH).assert_error(
        "model.name: own_model:Pyramid is custom code", "--trust-code"
    )
    second = paceline("train", str(rundir), "--resume", "--trust-code", **ON_PATH)
    assert second.code == 0 and "was already complete" in second.out


def test_trust_code_is_passed_to_the_runs_of_an_experiment(own_model_run, paceline, tmp_path) -> None:
    (tmp_path / "r.yaml").write_text("extends: digits\nmodel: {name: 'own_model:Pyramid'}\nparallel: {device: cpu}\n")
    quick = ("data.batch_size=32", "data.workers=0", "measure.warmup_steps=1", "log.tensorboard=off", "log.report=off")
    args = ("scale", "r.yaml", *quick, "--ranks", "2", "--steps", "2", "--repeats", "1", "--run-dir", "scaled")
    paceline(*args, **ON_PATH).assert_error("r.yaml:2: model.name: own_model:Pyramid is custom code")
    assert not (tmp_path / "scaled").exists()
    completed = paceline(*args, "--trust-code", **ON_PATH)
    assert completed.code == 0, completed.err


def test_a_run_of_a_missing_module_is_refused(own_model_run, paceline) -> None:
    _, rundir = own_model_run
    output = ("model.name: own_model:Pyramid: there is no module own_model", "PYTHONPATH=")
    paceline("eval", str(rundir), "--trust-code").assert_error(*output)
    paceline("eval", str(rundir), **ON_PATH).assert_error(
        "model.name: own_model:Pyramid is custom code", "(add --trust-code"
    )


def test_a_dry_run_imports_custom_modules(paceline) -> None:
    args = ("train", "digits", "model.name=own_model:Pyramid", "--dry-run")
    assert paceline(*args, **ON_PATH).code == 0
    paceline(*args, "model.args.widht=3", **ON_PATH).assert_error(
        "model.args.widht: is not an argument", "did you mean 'width'?"
    )
    paceline(*args, "optim={name: 'own_model:Adam', lr: 1}", **ON_PATH).assert_error(
        "optim.name: own_model:Adam: own_model has no Adam"
    )


def test_a_script_resumes_its_run_with_its_own_classes(forking, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    output = run(forking, tmp_path, "mine.py").splitlines()
    uninterrupted, resumed = (line for line in output if line.startswith("completed "))
    assert uninterrupted.split()[1] == "6" and resumed == uninterrupted
    assert output.count("run directory: halves") == 3 and output[-1] == "returned halves halves"
    assert output.count("halves: was already complete, so nothing was done") == 1
    assert "name: mine:blobs" in (tmp_path / "halves" / "recipe.yaml").read_text()
    used = json.loads((tmp_path / "halves" / "result.json").read_text())["provenance"]["own_parts"]
    assert set(used) == {"mine:blobs", "mine:Counting"}
    assert {each["sha256"] for each in used.values()} == {hashlib.sha256(SCRIPT.encode()).hexdigest()}


def test_a_custom_data_set_is_learnt(forking, tmp_path: Path) -> None:
    out = run(forking, tmp_path, str(EXAMPLES / "own_source.py"))
    _, result = result_of(tmp_path)
    assert result["eval"]["images"] == 80 and result["eval"]["top1"] > 0.7  # guessing is correct once in three times
    assert f"top1 {100 * result['eval']['top1']:.1f}% of 80 pictures" in out


def test_two_ranks_with_workers_read_the_same_custom_data(paceline) -> None:
    args = ["train", "synthetic", "data.source.name=own_source:Stripes", "data.source.args.num_images=64"]
    args += ["data.image_size=16", "data.batch_size=32", "train={steps: 2}", "data.augment=[]", "model.width=0.25"]
    args += ["parallel.device=cpu", "data.workers=1", "measure.warmup_steps=0", "log.report=off", "--json"]
    result = paceline(*args, "--ranks", "2", **ON_PATH).result
    assert result["world_size"] == 2 and result["images_seen"] == 64 and result["eval"]["images"] == 16
