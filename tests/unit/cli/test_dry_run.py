"""A dry run refuses what the run would refuse."""

import json
import sys

import pytest

from paceline.cli.dry_run import dry_run
from paceline.core.errors import DataError, RecipeError
from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.recipe.load import Patch, load
from paceline.training.resume import initialize_rundir

SIXTEEN_BITS = ["model.name=torchvision:resnet18", "model.width=1.0", "train.precision=bf16"]


@pytest.mark.parametrize(
    ("words", "error", "reason"),
    [
        (["data.stage=/dev/shm"], DataError, "data.stage: has no effect on digits"),
        (["data.loader=native"], RecipeError, "data.loader: native decodes image files"),
        (["train.class_weights={zz: 2}"], RecipeError, "train.class_weights: 'zz' is not a class of the dataset"),
        (["model.freeze=backbone", "optim.layer_decay=0.5"], RecipeError, "optim.layer_decay: 0.5 has no effect"),
        (SIXTEEN_BITS, RecipeError, "train.precision: bf16 on a CPU"),
        (["train.precision=fp16"], RecipeError, "train.precision: fp16 needs a GPU"),
        (["model.weights=none.pth"], RecipeError, "model.weights: none.pth: no such file"),
        (
            ["model.weights=DEFAULT"],
            RecipeError,
            "model.weights: DEFAULT: no such file .*torchvision:DEFAULT",
        ),
        (
            ["model.weights=https://a.b/c.pth"],
            RecipeError,
            "model.weights: https://a.b/c.pth: .*curl -LO https://a.b/c.p",
        ),
    ],
    ids=[
        "staging what is in memory",
        "a loader that cannot",
        "no such class",
        "one layer alone",
        "16 bits on maps of a pixel",
        "float16 on a CPU",
        "weights that are not there",
        "weights by name",
        "weights by URL",
    ],
)
def test_a_dry_run_refuses_whatever_the_run_would(words, error, reason):
    loaded = load("digits", Patch.parse([*words, "parallel.device=cpu"]))
    with pytest.raises(error, match=reason):
        dry_run(loaded, World(), 1, as_json=False)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    loaded = load("digits", Patch.parse([f"log.sinks=[{name}]", "parallel.device=cpu"]))
    with pytest.raises(RecipeError, match=rf"log.sinks\[0\]: {name} is not installed"):
        dry_run(loaded, World(), 1, as_json=False)


def test_the_plan_has_the_notes_that_the_run_would_have(capsys):
    words = ["data.loader=threads", "data.workers=1", "parallel.timeout=1min", "parallel.device=cpu"]
    words = [*words, "model.name=empty", "model.width=1.0", "model.freeze=[classifier.bias]"]
    words = [*words, 'train.class_weights={"7": 2}']
    assert dry_run(load("digits", Patch.parse(words)), World(), 1, as_json=True) == 0
    frozen, note, weights = json.loads(capsys.readouterr().out)["plan"]["notes"]
    assert frozen.startswith("model.freeze: 10 parameters of 20 are trained; the others keep their random")
    assert note.startswith("data.worker_timeout: 5min has no effect: parallel.timeout of 1min ends the run first")
    assert weights.startswith("train.class_weights: from 0.9")


def test_a_dry_run_prints_the_plan_without_the_recipe(capsys):
    words = ["data.batch_size=64", "train.epochs=2", "train.accumulate=2", "parallel.device=cpu"]
    assert dry_run(load("digits", Patch.parse(words)), World(), 1, as_json=False) == 0
    printed = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert printed["model"] == "resnet18_cifar"
    assert printed["data"] == "digits, 1,438 training and 359 validation images, 10 classes, 16 px"
    assert printed["batch"] == "64 images per step, 64 per rank, 32 at once"
    assert printed["steps"] == "44 (2 epochs of 22 steps; the last 30 images of each epoch are dropped)"
    assert printed["devices"].startswith("1 CPU rank with ") and len(printed) < 15


def test_a_dry_run_of_a_resumed_run_has_its_batch(capsys, tmp_path):
    """A preset with a batch per rank gives way to the run's batch; a batch on the command line does not."""
    small = ["data.source.name=digits", "model.name=resnet18_cifar", "model.width=0.25", "parallel.device=cpu"]
    small = [*small, "data.mean=auto", "data.std=auto"]
    began = load("ddp-post/ddp", Patch.parse([*small, "data.rank_batch_size=auto", "data.batch_size=512"]))
    run = RunDir(tmp_path / "run")
    initialize_rundir(run, began.recipe, {})
    again = load("ddp-post/ddp", Patch.parse([*small, "data.workers=0"]))
    assert dry_run(again, World(), 1, as_json=False, resumed=run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "batch: 512 images per step, 512 per rank" in lines
    assert any("resumed on 1 rank with data.batch_size=512" in line for line in lines)
    assert "note: resumed with data.workers=0, which was 10" in lines
    assert dry_run(again, World(), 1, as_json=False) == 0
    assert "batch: 256 images per step, 256 per rank" in capsys.readouterr().out.splitlines()
    printed = load("ddp-post/ddp", Patch.parse([*small, "data.rank_batch_size=64"]))
    with pytest.raises(RecipeError, match=r"was started with data\.batch_size=512 \(now 64\)"):
        dry_run(printed, World(), 1, as_json=False, resumed=run)
