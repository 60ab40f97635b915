"""Runs with `model.lora` train adapters alone, resume with equal bits, and are evaluated and continued without them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.data.sources.build import build_datasets
from paceline.inference.classifier import load_classifier
from paceline.models import lora
from paceline.recipe.load import Patch, load
from paceline.training.preflight import measure_saving
from paceline.training.process import Invocation
from paceline.training.run import run

pytest.importorskip("peft", reason="not installed: pip install 'paceline[lora]'")
WORDS = (
    *("data.source.num_images=48", "data.source.num_val_images=12", "data.source.image_size=32", "data.batch_size=12"),
    *("train.steps=4", "train.eval_every=2st", "checkpoint.every=2st", "checkpoint.keep=9", "data.workers=0"),
    *("parallel.device=cpu", "parallel.threads=1", "measure.telemetry=off", "log.tensorboard=off", "log.report=off"),
    *("model.name=timm:test_vit", "model.width=1", "optim.name=adamw", "optim.lr=0.01"),
)
LORA = ("model.lora={rank: 4, dropout: 0.2}",)


def train(folder: Path, *overrides: str, resume: bool = False) -> RunDir:
    recipe = load("synthetic", Patch.parse([*WORDS, *overrides])).recipe
    run(recipe, World.single(), RunDir(folder), resume=resume, invocation=Invocation())
    return RunDir(folder)


def saved(rundir: RunDir, part: str = "model") -> list[dict[str, Tensor]]:
    """Return what all checkpoints hold of a run, the oldest first."""
    return [load_file(each / f"{part}.safetensors") for each in sorted(rundir.checkpoints.glob("step-*"))]


def changed(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    return {name for name in one if not torch.equal(one[name], other[name])}


def test_doctor_saves_what_a_run_with_adapters_saves(tmp_path: Path) -> None:
    rundir = train(tmp_path / "run", *LORA)
    newest = max(rundir.checkpoints.glob("step-*"))
    in_run = sum(tensor.nbytes for file in newest.glob("*.safetensors") for tensor in load_file(file).values())
    recipe = load("synthetic", Patch.parse([*WORDS, *LORA])).recipe
    measured = measure_saving(recipe, tmp_path, build_datasets(recipe.data.source, may_download=False), times=1)
    assert measured.bytes == in_run


@pytest.mark.parametrize(
    "overrides",
    [(), ("train.ema={decay: 0.5}", "train.precision=bf16_master", "train.accumulate=2", "optim.layer_decay=0.5")],
    ids=["float32", "averaged, master copies, micro-batches, by layer"],
)
def test_adapters_alone_are_trained_and_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, cut, overrides: tuple[str, ...]
) -> None:
    whole = train(tmp_path / "whole", *LORA, *overrides)
    two, four = saved(whole)
    adapters = {name for name in two if ".lora_A." in name or ".lora_B." in name}
    assert changed(two, four) == adapters | {"head.weight", "head.bias"} and len(adapters) == 48
    resumed = train(cut(whole.path, tmp_path / "cut", 2), *LORA, *overrides, resume=True)
    for part in ("model", "optimizer"):
        for one, other in zip(saved(whole, part), saved(resumed, part), strict=True):
            assert one.keys() == other.keys() and not changed(one, other)


def test_the_run_is_used_and_continued_as_a_plain_model_without_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(tmp_path / "whole", *LORA, "train.ema={decay: 0.5}")
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    model = load_classifier(whole.path).model
    assert not [name for name, _ in model.named_parameters() if "lora" in name or "base_layer" in name]
    plain = train(tmp_path / "next", f"model.weights={whole.path}", "train.steps=1", "optim.lr=1e-12")
    (one,) = saved(plain)
    expected = model.state_dict()
    assert one.keys() == expected.keys()
    assert all((one[name] - expected[name]).abs().max() < 1e-6 for name in one)
    (averages,) = saved(whole, "average")[-1:]
    assert not torch.equal(expected["head.bias"], saved(whole)[-1]["head.bias"])
    assert torch.equal(expected["head.bias"], averages["head.bias"])
