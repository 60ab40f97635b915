"""What a run does not train keeps still from the first step to the last, evaluated, resumed or neither."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.contrib import cuda_graphs
from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.recipe.load import Patch, load
from paceline.training.process import Invocation
from paceline.training.run import run

from ..contrib.cpu_graphs import RecordedGraphs

STEPS = 8
WORDS = (
    *("data.source.num_images=48", "data.source.num_val_images=6", "data.source.image_size=8", "data.batch_size=12"),
    *("train.epochs=2", "train.eval_every=3st", "checkpoint.every=2st", "checkpoint.keep=9", "data.workers=0"),
    *("parallel.device=cpu", "parallel.threads=1", "measure.telemetry=off", "log.tensorboard=off", "log.report=off"),
)


class Net(nn.Module):
    """A backbone that has a batch norm and drops some of its output, and a classifier after a batch norm."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(in_channels, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.backbone(images)).mean(dim=(2, 3)))
        return logits


class Still(Net):
    """Its backbone's norm is frozen, the usual way."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.backbone.eval()
        return self


class Evaluated(Net):
    """Its backbone is in evaluation mode as it is made, which no `train()` of its own keeps up."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__(num_classes, in_channels)
        self.backbone.eval()


@pytest.fixture(autouse=True)
def nets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = type(sys)("nets_that_keep_still")
    for each in (Net, Still, Evaluated):
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield


def train(folder: Path, *overrides: str, resume: bool = False) -> RunDir:
    recipe = load("synthetic", Patch.parse([*WORDS, *overrides])).recipe
    run(recipe, World.single(), RunDir(folder), resume=resume, invocation=Invocation())
    return RunDir(folder)


def name(net: type[nn.Module]) -> str:
    return f"model.name=nets_that_keep_still:{net.__name__}"


def saved(rundir: RunDir, part: str = "model") -> list[dict[str, Tensor]]:
    """Return what all checkpoints hold of a run, the oldest first."""
    found = [load_file(each / f"{part}.safetensors") for each in sorted(rundir.checkpoints.glob("step-*"))]
    assert len(found) == STEPS // 2
    return found


def counters(tensors: dict[str, Tensor]) -> tuple[int, int]:
    return int(tensors["backbone.1.num_batches_tracked"]), int(tensors["norm.num_batches_tracked"])


@pytest.mark.parametrize(
    ("overrides", "backbone"),
    [
        ((name(Still),), 0),
        ((name(Evaluated),), 1),
        ((name(Net), "model.freeze=backbone"), 0),
        ((name(Net), "model.freeze=[backbone.*]", "train.ema={decay: 0.5}", "optim.name=adamw"), 0),
    ],
    ids=["its own train()", "evaluated as it is made", "a frozen backbone", "frozen by a pattern, averaged"],
)
@pytest.mark.parametrize("step", [2, 4])
def test_it_moves_or_not_before_and_after_an_evaluation_and_when_resumed(
    tmp_path: Path, cut, overrides: tuple[str, ...], backbone: int, step: int
) -> None:
    """The first evaluation is after step 3: the run goes on from a checkpoint before it, and from one after."""
    whole = train(tmp_path / "whole", *overrides)
    is_counting = "model.freeze=backbone" not in overrides
    expected = [(backbone * number, is_counting * number) for number in range(2, STEPS + 1, 2)]
    assert [counters(each) for each in saved(whole)] == expected
    resumed = train(cut(whole.path, tmp_path / "cut", step), *overrides, resume=True)
    assert resumed.read_result().weights_sha256 == whole.read_result().weights_sha256
    for part in ("model", "optimizer"):
        for one, other in zip(saved(whole, part), saved(resumed, part), strict=True):
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    "overrides",
    [
        ("optim.weight_decay=0.5", "train.ema={decay: 0.5}"),
        ("optim.name=schedule_free", "schedule.name=constant"),
        ("train.precision=bf16_master", "train.accumulate=2"),
        ("model.norm=sync_batch", "train.on_nonfinite=skip", "optim.name=lamb"),
        ("train.capture=on", "data.augment_on=device", "data.augment=[flip]"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_a_frozen_backbone_keeps_its_bits_and_is_not_in_the_optimizer(
    tmp_path: Path, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = RecordedGraphs()
    monkeypatch.setattr(cuda_graphs, "build_graph_pool", lambda device: graphs)
    run = train(tmp_path / "run", name(Net), "model.freeze=backbone", *overrides)
    first, *_, last = models = saved(run)
    frozen = [key for key in first if not key.startswith("head.")]
    assert len(frozen) == 12
    assert all(torch.equal(each[key], first[key]) for each in models for key in frozen)
    assert not torch.equal(last["head.weight"], first["head.weight"])
    assert counters(last) == (0, 0) and torch.equal(last["norm.running_mean"], torch.zeros(4).to(first["norm.bias"]))
    assert {key.split(".")[0] for each in saved(run, "optimizer") for key in each} == {"0", "1"}  # weight and bias
    if "train.ema={decay: 0.5}" in overrides:
        average = saved(run, "average")[-1]
        assert all(torch.equal(average[key], first[key]) for key in frozen)
    assert len(graphs.made) == ("train.capture=on" in overrides)


def test_the_plan_says_how_many_parameters_are_trained_of_how_many(tmp_path: Path) -> None:
    overrides = (name(Net), "model.freeze=backbone", "train.epochs=1")
    notes = json.loads((train(tmp_path / "run", *overrides).path / "plan.json").read_text())["notes"]
    assert "model.freeze: 50 parameters of 178 are trained" in notes


def test_a_second_stage_trains_all_from_where_the_first_has_ended(tmp_path: Path) -> None:
    first = train(tmp_path / "first", name(Net), "model.freeze=backbone")
    (weights,) = first.checkpoints.glob(f"step-*{STEPS}/model.safetensors")
    second = train(tmp_path / "second", name(Net), f"model.weights={weights}", "optim.lr=1e-30")
    ended, began = saved(first)[-1], saved(second)[0]
    learnt = {key for key in ended if "running" not in key and "num_batches" not in key}
    # At such a learning rate a step moves nothing but what is 0.
    assert len(learnt) == 8 and all(torch.equal(1 + ended[key], 1 + began[key]) for key in learnt)
    third = train(tmp_path / "third", name(Net), f"model.weights={weights}", "optim.lr=0.5")
    assert all(not torch.equal(ended[key], saved(third)[-1][key]) for key in learnt - {"backbone.0.bias"})
    assert counters(saved(third)[-1]) == (STEPS, STEPS)
