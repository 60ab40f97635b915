"""Distillation: the same on two ranks, resumed as uninterrupted, and only from a teacher of the same classes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

SMALL = (
    *("train", "digits", "model.norm=none", "data.image_size=8", "data.batch_size=120", "train.epochs=auto"),
    *("log.every=1st", "schedule.warmup=0st", "parallel.threads=1", "data.workers=0", "log.tensorboard=off"),
    *("log.report=off", "log.worst=0", "measure.telemetry=off", "--json"),
)
TEACHER = (*SMALL, "model.width=0.25", "train.steps=20", "train.eval_every=off", "seed=5")
STUDENT = (
    *(*SMALL, "model.width=0.1", "train.steps=8", "optim.lr=0.01", "train.eval_every=4st", "checkpoint.every=2st"),
    *("checkpoint.keep=9", "data.augment=[pad_crop,mixup]", "train.accumulate=2", "train.precision=fp64"),
)
SOFT = ("train.distill={teacher: teacher, weight: 0.7, temperature: 3}",)
HARD = ("train.distill={teacher: teacher, kind: hard}",)


@pytest.fixture(scope="module")
def finished(paceline_in, tmp_path_factory) -> Path:
    """Return a folder with two finished runs: `teacher`, and `plain`, a student without one."""
    folder = tmp_path_factory.mktemp("finished")
    for args, name in ((TEACHER, "teacher"), (STUDENT, "plain")):
        paceline_in(folder)(*args, "--run-dir", name).result  # noqa: B018
    return folder


@pytest.fixture
def teacher(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished / "teacher", tmp_path / "teacher")


@pytest.mark.parametrize("options", [SOFT, pytest.param(HARD, marks=pytest.mark.long)], ids=["soft", "hard"])
def test_two_ranks_learn_what_one_does_and_a_killed_run_resumes_to_the_same_bits(
    paceline, tmp_path: Path, cut, lines_of, finished: Path, teacher: Path, options
) -> None:
    plain = json.loads((finished / "plain" / "result.json").read_text())
    for ranks in "12":
        args = (*STUDENT, *options, "--ranks", ranks, "--run-dir")
        whole = paceline(*args, f"whole{ranks}").result
    cut(tmp_path / "whole2", tmp_path / "cut2", 4)
    resumed = paceline(*args, "cut2", "--resume").result
    assert resumed["weights_sha256"] == whole["weights_sha256"] != plain["weights_sha256"]
    assert resumed["provenance"]["teacher"] == whole["provenance"]["teacher"]
    losses = [[row["loss"] for row in lines_of(tmp_path / f"whole{ranks}" / "steps.jsonl")] for ranks in "12"]
    # float64 rounds at 1e-16, and each step amplifies that.
    assert losses[1] == pytest.approx(losses[0], abs=1e-8) and len(losses[0]) == 8
    # The teacher is neither trained nor saved.
    assert whole["parameters"] == plain["parameters"]
    sizes = {(run / "checkpoints" / "step-00000008" / "model.safetensors").stat().st_size
             for run in (finished / "plain", tmp_path / "whole2")}  # fmt: skip
    assert len(sizes) == 1


def test_another_teacher_is_refused_on_resume(paceline, tmp_path: Path, cut, teacher: Path) -> None:
    file = tmp_path / "teacher.safetensors"
    (newest,) = teacher.glob("checkpoints/step-*/model.safetensors")
    shutil.copy(newest, file)
    distill = "train.distill={teacher: teacher.safetensors}"
    args = (*STUDENT, "model.width=0.25", "train.steps=4", distill, "--run-dir", "run")
    whole = paceline(*args).result
    assert len(whole["provenance"]["teacher"]["sha256"]) == 64
    cut(tmp_path / "run", tmp_path / "cut", 2)
    tensors = load_file(file)
    save_file({name: tensor + torch.ones_like(tensor) for name, tensor in tensors.items()}, file)
    refused = paceline(*args[:-1], "cut", "--resume")
    assert refused.code == 2 and "train.distill.teacher: teacher.safetensors: its SHA-256 is" in refused.err
    assert "(bring that teacher back, or start a new run)" in refused.err and "Traceback" not in refused.err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            ("data.source={name: synthetic, num_classes: 4}", "train.distill.teacher=teacher"),
            "was not trained on the 4 classes",
        ),
        (("train.distill.teacher=timm:nothing",), "train.distill.teacher: 'timm:nothing' is not a model"),
        (
            ("data.source={name: synthetic, channels: 3}", "train.distill.teacher=teacher"),
            "was trained on images of 1 channel of uint8, and the dataset has 3 channels of uint8",
        ),
        (("train.distill.teacher=nothing.pth",), "train.distill.teacher: nothing.pth: no such file"),
        (("train.distill.teacher=torchvision:IMAGENET1K_V1",), "(set train.distill.model=torchvision:NAME)"),
        (("train.distill={teacher: x, kind: hard, temperature: 2}",), "temperature has no effect with kind hard"),
    ],
)  # fmt: skip
def test_what_cannot_teach_is_refused_in_one_line(paceline, teacher: Path, options, problem: str) -> None:
    for dry in ((), ("--dry-run",)):
        refused = paceline(*STUDENT, *options, *dry, "--run-dir", "run")
        assert refused.code == 2 and problem in refused.err and refused.err.count("error: ") == 1
        assert "Traceback" not in refused.err
