"""Runs with frozen layers train only the others, and a resumed run has the same weights as an uninterrupted one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ARGS = (
    *("train", "synthetic", "model.width=0.1", "data.source.num_images=48", "data.source.num_val_images=12"),
    *("data.source.image_size=16", "data.batch_size=12", "data.workers=0", "train.steps=4", "train.eval_every=3st"),
    *("checkpoint.every=2st", "parallel.threads=1", "log.tensorboard=off", "log.report=off", "log.worst=0"),
    *("measure.telemetry=off", "--ranks", "2"),
)


@pytest.mark.parametrize(
    "args",
    [
        ("parallel.static_graph=true", "model.norm=sync_batch"),
        ("parallel.strategy=fsdp", "train.accumulate=2", "train.ema={decay: 0.5}"),
    ],
    ids=["ddp", "fsdp"],
)
def test_a_frozen_backbone_stays_fixed_and_a_resumed_run_has_equal_weights(paceline, tmp_path: Path, cut, args) -> None:
    args = (*ARGS, *args, "model.freeze=backbone")
    uninterrupted = paceline(*args, "--run-dir", "whole", "--json").result
    cut(tmp_path / "whole", tmp_path / "cut", 2)
    resumed = paceline(*args, "--run-dir", "cut", "--resume", "--json").result
    assert resumed["weights_sha256"] == uninterrupted["weights_sha256"]
    two, four = (
        load_file(path) for path in sorted((tmp_path / "cut" / "checkpoints").glob("step-*/model.safetensors"))
    )
    assert {key for key in two if not torch.equal(two[key], four[key])} == {"classifier.weight", "classifier.bias"}
    assert {int(four[key]) for key in four if key.endswith("num_batches_tracked")} == {0}


@pytest.mark.parametrize(
    ("args", "last_step"),
    [
        (("parallel.static_graph=true", "train.ema={decay: 0.5}"), 2),
        (("parallel.strategy=fsdp", "train.accumulate=2", "optim.name=adamw"), 4),
    ],
    ids=["ddp, before it unfreezes", "fsdp, at the boundary"],
)
def test_a_resumed_run_that_unfreezes_has_equal_weights(paceline, tmp_path: Path, cut, args, last_step: int) -> None:
    args = (*ARGS, "train.steps=8", "checkpoint.keep=9", "model.norm=sync_batch", *args)
    args = (*args, "model.freeze=backbone", "model.unfreeze=4st")
    uninterrupted = paceline(*args, "--run-dir", "whole", "--json").result
    cut(tmp_path / "whole", tmp_path / "cut", last_step)
    resumed = paceline(*args, "--run-dir", "cut", "--resume", "--json").result
    assert resumed["weights_sha256"] == uninterrupted["weights_sha256"] and resumed["steps"] == 8


ADAPTERS = pytest.param(("model.lora={rank: 2}",), id="adapters", marks=pytest.mark.long)  # imports take longest


@pytest.mark.parametrize("args", [pytest.param((), id="unfrozen later"), ADAPTERS])
def test_two_ranks_train_as_one(paceline, tmp_path: Path, args) -> None:
    """In float64 the order of sums changes the last bits alone."""
    head_first = ("model.norm=sync_batch", "model.freeze=backbone", "model.unfreeze=2st")
    if args:
        pytest.importorskip("peft", reason="not installed: pip install 'paceline[lora]'")
        head_first = ("model.name=timm:test_vit", "model.width=1", "data.source.image_size=32")
    args = (*ARGS[:-2], *head_first, *args, "train.precision=fp64", "data.augment=[]")
    for ranks, run in (("1", "one"), ("2", "two")):
        assert paceline(*args, "--ranks", ranks, "--run-dir", run, "--json").result["steps"] == 4
    first, one, two = (
        load_file(tmp_path / run / "checkpoints" / f"step-0000000{step}" / "model.safetensors")
        for run, step in (("one", 2), ("one", 4), ("two", 4))
    )
    assert one.keys() == two.keys()
    assert max((one[key] - two[key]).abs().max().item() for key in one) < 1e-10
    assert max((one[key] - first[key]).abs().max().item() for key in one) > 1e-4
