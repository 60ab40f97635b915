"""A run that could not write or save is refused before its first step."""

import os
import shutil
import subprocess
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from paceline.core.errors import RecipeError
from paceline.core.run_dir import RunDir
from paceline.data.sources.builtin import load_digits
from paceline.parallel.strategy import SingleDevice
from paceline.recipe.load import Patch, load
from paceline.recipe.plan import Plan
from paceline.recipe.schema.recipe import Checkpoint
from paceline.training.checkpoint import model_tensors, optimizer_tensors
from paceline.training.ema import build_weight_average
from paceline.training.optim.build import build_optimizer
from paceline.training.optim.extra_state import ExtraOptimizerState
from paceline.training.outputs import check_disk, estimate_checkpoint_bytes
from paceline.training.precision import build_precision
from paceline.training.saver import TrainingState

MIB = 2**20
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    """Return a function that gives the disk so many free bytes."""

    def set_free(number: int, total: int = 1 << 40) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(total, total - number, number))

    return set_free


def plan_for(section: Checkpoint, steps: int = 100) -> Plan:
    words = [f"train.steps={steps}", f"checkpoint.every={section.every if section.every == 'off' else '1st'}"]
    if section.keep_every != "off":
        words.append(f"checkpoint.keep_every={section.keep_every}")
    digits = load_digits()
    return Plan.derive(load("digits", Patch.parse(words)).recipe, 1, digits.train.info, digits.val.info)


def warnings_of(folder: Path, section: Checkpoint, state_bytes: int, steps: int = 100) -> list[str]:
    said: list[str] = []
    check_disk(RunDir(folder), section, plan_for(section, steps), state_bytes, said.append)
    assert not list(folder.glob(".*")), "the probe stays"
    return said


def test_a_disk_with_room_for_all_gives_no_warning(tmp_path: Path, free) -> None:
    free(50 * MIB)
    assert warnings_of(tmp_path, Checkpoint(keep=3), 10 * MIB) == []


def test_a_disk_with_room_for_some_is_a_warning_with_numbers(tmp_path: Path, free) -> None:
    free(50 * MIB - 1)
    assert warnings_of(tmp_path, Checkpoint(keep=3), 10 * MIB) == [
        f"checkpoint: {tmp_path} has 50.0 MiB free, 5 checkpoints of 10.0 MiB take 50.0 MiB (free some space, or set "
        "checkpoint.keep=2)"
    ]


@pytest.mark.parametrize(
    ("section", "num_fitting", "fix"),
    [
        (Checkpoint(keep=3, keep_best="off"), 3, "(free some space, or set checkpoint.keep=2)"),
        (Checkpoint(keep=3), 2, "(free some space, or set checkpoint.keep=1 checkpoint.keep_best=off)"),
        (Checkpoint(keep=1), 2, "(free some space, or set checkpoint.keep_best=off)"),
        (Checkpoint(keep=1), 1, "(free some space)"),
        (Checkpoint(keep=3, keep_every="25st"), 7, "(free some space, or set checkpoint.keep=1)"),
    ],
)
def test_the_advice_is_what_fits(tmp_path: Path, free, section: Checkpoint, num_fitting: int, fix: str) -> None:
    free(num_fitting * 10 * MIB)
    (warning,) = warnings_of(tmp_path, section, 10 * MIB)
    assert warning.endswith(fix)


def test_a_run_needs_no_more_room_than_for_the_checkpoints_it_writes(tmp_path: Path, free) -> None:
    free(20 * MIB)
    assert warnings_of(tmp_path, Checkpoint(keep=3), 10 * MIB, steps=2) == []
    assert warnings_of(tmp_path, Checkpoint(keep=1, keep_best="off"), 10 * MIB) == []


def test_existing_checkpoints_need_no_more_room(tmp_path: Path, free) -> None:
    for step in range(3):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    free(20 * MIB)
    assert warnings_of(tmp_path, Checkpoint(keep=3), 10 * MIB) == []


# matrix: 30
def test_a_disk_on_which_not_even_one_fits_is_refused(tmp_path: Path, free) -> None:
    free(10 * MIB - 1)
    with pytest.raises(RecipeError) as caught:
        warnings_of(tmp_path, Checkpoint(keep=1), 10 * MIB)
    assert str(caught.value) == (
        f"checkpoint: {tmp_path} has 10.0 MiB free, a checkpoint takes 10.0 MiB (free some space, name another with "
        "--run-dir, or set checkpoint.every=off)"
    )
    assert warnings_of(tmp_path, Checkpoint(every="off"), 10 * MIB) == []


def test_a_file_system_without_a_size_is_not_checked(tmp_path: Path, free) -> None:
    free(0, total=0)
    assert warnings_of(tmp_path, Checkpoint(), 10 * MIB) == []


# matrix: 31
def test_a_folder_that_is_gone_is_refused_with_its_path_and_the_reason(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        warnings_of(tmp_path / "gone", Checkpoint(), 1)
    assert str(caught.value) == (
        f"--run-dir: {tmp_path}/gone cannot be written to: No such file or directory (name another)"
    )


# matrix: 31
@pytest.mark.parametrize(("mount", "reason"), [("ro", "Read-only file system"), ("size=4k", "No space left on device")])
def test_an_unwritable_mount_is_refused(tmp_path: Path, mount: str, reason: str) -> None:
    """The superuser may write anywhere but here. The tiny one is filled by its folder and a byte."""
    script = 'mount -t tmpfs -o "$1" tmpfs "$2" && { echo x > "$2/x"; echo mounted; read until_closed; }'
    command = ["unshare", "-m", "sh", "-c", script, "sh", mount, str(tmp_path)]
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root may mount a file system in a name space of its own")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as holder:
        if holder.stdout.readline() != "mounted\n":
            pytest.skip(f"no mount here: {holder.communicate(timeout=60)[1].splitlines()[0]}")
        seen = Path(f"/proc/{holder.pid}/root{tmp_path}")  # as the processes of that name space see it
        with pytest.raises(RecipeError) as caught:
            check_disk(RunDir(seen), Checkpoint(), plan_for(Checkpoint()), 1, print)
        holder.communicate("", timeout=60)
    assert str(caught.value) == f"--run-dir: {seen} cannot be written to: {reason} (name another)"


WORDS = [
    "sgd",
    "sgd optim.momentum=0 optim.nesterov=false",
    "adam",
    "adamw",
    "rmsprop",
    "lars",
    "lamb",
    "novograd",
    "muon",
]
WORDS += ["schedule_free schedule.name=constant", "sgd train.ema.decay=0.9", "sgd train.precision=bf16_master"]


@pytest.mark.parametrize("overrides", WORDS)
def test_the_size_of_a_checkpoint_is_known_before_the_first_step(overrides: str) -> None:
    recipe = load("digits", Patch.parse([f"optim.name={overrides.split()[0]}", *overrides.split()[1:]])).recipe
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.BatchNorm2d(64), torch.nn.Linear(64, 100))
    precision = build_precision(recipe.train.precision, torch.device("cpu"))
    precision.cast_model(model)
    named = precision.optimized_parameters(model)
    optimizer = build_optimizer(recipe.optim, named, "cpu")
    average = build_weight_average(recipe.train.ema, model, optimizer, named)
    extra_state = ExtraOptimizerState.from_optimizer(optimizer, recipe.optim.name)
    persistent = TrainingState(model, optimizer, None, precision, average, SingleDevice(), extra_state)
    before = estimate_checkpoint_bytes(persistent, recipe.optim)
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    averages = average.tensors() if average else {}
    parts = [model_tensors(model), optimizer_tensors(optimizer), precision.tensors(), averages]
    exact = sum(tensor.nbytes for part in parts for tensor in part.values())
    assert estimate_checkpoint_bytes(persistent, recipe.optim) == exact
    # Counts of steps, a few bytes a parameter; Muon's other parameters have a second moment of their own.
    assert before == pytest.approx(exact, rel=0.3 if overrides == "muon" else 0.01)
