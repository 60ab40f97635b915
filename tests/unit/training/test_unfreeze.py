"""`model.unfreeze` keeps frozen layers still up to a step, and then trains them as a run without frozen layers does."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.core.errors import RecipeError
from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.recipe.load import Patch, load
from paceline.training.process import Invocation
from paceline.training.run import run

STEPS, BOUNDARY = 8, 4
WORDS = (
    *("data.source.num_images=48", "data.source.num_val_images=6", "data.source.image_size=8", "data.batch_size=12"),
    *("train.epochs=2", "train.eval_every=3st", "checkpoint.every=2st", "checkpoint.keep=9", "data.workers=0"),
    *("parallel.device=cpu", "parallel.threads=1", "measure.telemetry=off", "log.tensorboard=off", "log.report=off"),
    "model.name=nets_to_unfreeze:Net",
)
HEAD_FIRST = ("model.freeze=backbone", f"model.unfreeze={BOUNDARY}st")
HEAD = {"head.weight", "head.bias"}


class Net(nn.Module):
    """A backbone with a batch norm and dropout, and a classifier."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(in_channels, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(images).mean(dim=(2, 3)))
        return logits


class HalfStill(Net):
    """Its own code freezes the convolution."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__(num_classes, in_channels)
        self.backbone[0].requires_grad_(False)


@pytest.fixture(autouse=True)
def nets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = type(sys)("nets_to_unfreeze")
    module.Net, module.HalfStill = Net, HalfStill
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield


def train(folder: Path, *overrides: str, resume: bool = False) -> RunDir:
    recipe = load("synthetic", Patch.parse([*WORDS, *overrides])).recipe
    run(recipe, World.single(), RunDir(folder), resume=resume, invocation=Invocation())
    return RunDir(folder)


def saved(rundir: RunDir, part: str = "model") -> list[dict[str, Tensor]]:
    """Return what all checkpoints hold of a run, the oldest first."""
    found = [load_file(each / f"{part}.safetensors") for each in sorted(rundir.checkpoints.glob("step-*"))]
    assert len(found) == STEPS // 2
    return found


def changed(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    return {name for name in one if not torch.equal(one[name], other[name])}


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.ema={decay: 0.5}",),
        ("optim.name=adamw", "train.precision=bf16_master", "train.clip_agc=0.01", "train.accumulate=2"),
        ("optim.name=lamb", "train.clip_norm=1", "optim.layer_decay=0.5", "train.on_nonfinite=skip"),
    ],
    ids=["sgd, averaged", "adamw, master copies, clipped by unit, micro-batches", "lamb, by layer, clipped"],
)
def test_the_classifier_trains_first_and_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, cut, overrides: tuple[str, ...]
) -> None:
    """The run is resumed before the boundary, at it and after it."""
    whole = train(tmp_path / "whole", *HEAD_FIRST, *overrides)
    two, four, six, eight = saved(whole)
    assert changed(two, four) == HEAD
    assert changed(four, six) == changed(six, eight) == set(four)
    assert [int(each["backbone.1.num_batches_tracked"]) for each in (four, eight)] == [
        0,
        4 * (2 if "train.accumulate=2" in overrides else 1),
    ]
    for step in (2, BOUNDARY, 6):
        resumed = train(cut(whole.path, tmp_path / f"cut-{step}", step), *HEAD_FIRST, *overrides, resume=True)
        assert resumed.read_result().weights_sha256 == whole.read_result().weights_sha256
        for part in ("model", "optimizer"):
            for one, other in zip(saved(whole, part), saved(resumed, part), strict=True):
                assert one.keys() == other.keys() and not changed(one, other)


def test_after_the_boundary_it_trains_as_a_run_without_frozen_layers_that_has_these_weights(
    tmp_path: Path, cut
) -> None:
    """Without momentum, the checkpoint at the boundary is all that such a run needs."""
    plain = ("optim.momentum=0", "optim.nesterov=false", "optim.weight_decay=0.01", "schedule.name=cosine")
    head_first = train(tmp_path / "head-first", *HEAD_FIRST, *plain)
    whole = train(tmp_path / "whole", *plain)
    oracle = cut(whole.path, tmp_path / "oracle", BOUNDARY)
    checkpoint = f"checkpoints/step-{BOUNDARY:08}"
    shutil.rmtree(oracle / checkpoint)
    shutil.copytree(head_first.path / checkpoint, oracle / checkpoint)
    expected = saved(train(oracle, *plain, resume=True))[-1]
    assert not changed(saved(head_first)[-1], expected) and changed(saved(whole)[-1], expected)


def test_the_head_phase_is_that_of_a_run_with_a_frozen_backbone(tmp_path: Path) -> None:
    head_first = train(tmp_path / "head-first", *HEAD_FIRST)
    frozen = train(tmp_path / "frozen", "model.freeze=backbone")
    assert not changed(saved(head_first)[1], saved(frozen)[1]) and changed(saved(head_first)[2], saved(frozen)[2])


def test_plan_and_log_of_pauses_say_when_it_unfreezes(tmp_path: Path) -> None:
    rundir = train(tmp_path / "run", *HEAD_FIRST)
    plan = json.loads((rundir.path / "plan.json").read_text())
    assert plan["unfreeze_step"] == BOUNDARY
    total = sum(each.numel() for each in Net(10, 3).parameters())
    (note,) = (each for each in plan["notes"] if each.startswith("model.unfreeze:"))
    assert all(text in note for text in ("50 parameters", f"of {total}", "first 4 steps", f"then {total}"))
    pauses = [json.loads(line) for line in rundir.pauses.read_text().splitlines()]
    assert [each["step"] for each in pauses if each["name"] == "unfreeze"] == [BOUNDARY]


def test_a_run_that_ends_before_the_boundary_is_noted(tmp_path: Path) -> None:
    rundir = train(tmp_path / "run", "model.freeze=backbone", "model.unfreeze=5ep")
    notes = json.loads((rundir.path / "plan.json").read_text())["notes"]
    assert any(each.startswith("model.unfreeze: the run ends at step 8") and "20" in each for each in notes)


def test_parameters_that_the_model_itself_freezes_are_not_trained(tmp_path: Path) -> None:
    name = "model.name=nets_to_unfreeze:HalfStill"
    with pytest.raises(RecipeError, match=r"model\.unfreeze: 'backbone\.0\.weight' .*model\.freeze"):
        train(tmp_path / "run", *HEAD_FIRST, name)
    other = train(tmp_path / "other", name, "model.freeze=['backbone.1.*']", "model.unfreeze=4st")
    two, four, six, _ = saved(other)
    assert changed(two, four) == HEAD
    assert changed(four, six) == set(four) - {"backbone.0.weight", "backbone.0.bias"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.unfreeze=2ep",), r"model\.unfreeze: 2ep .*model\.freeze"),
        (("model.freeze=backbone", "model.unfreeze=0ep"), r"model\.unfreeze: 0ep .*freeze=off"),
        (("model.lora=on", "model.unfreeze=2ep"), r"model\.unfreeze: 2ep .*model\.lora"),
        ((*HEAD_FIRST, "train.capture=on"), r"model\.unfreeze: 4st .*train\.capture=on"),
        ((*HEAD_FIRST, "parallel.compression=powersgd"), r"model\.unfreeze: 4st .*compression=powersgd"),
        ((*HEAD_FIRST, "optim.name=schedule_free"), r"model\.unfreeze: 4st .*schedule_free"),
    ],
)
def test_what_it_does_not_work_with_is_an_error(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load("synthetic", Patch.parse([*WORDS, *overrides]))
