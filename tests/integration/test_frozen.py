"""Runs with frozen layers train only the others, and a resumed run has the same weights as an uninterrupted one."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ARGS = (
    *("train", "synthetic", "model.width=0.1", "data.source.num_images=48", "data.source.num_val_images=12"),
    *("data.batch_size=12", "data.workers=0", "train.steps=4", "train.eval_every=3st", "checkpoint.every=2st"),
    *("parallel.threads=1", "log.tensorboard=off", "log.report=off", "measure.telemetry=off", "--ranks", "2"),
)


@pytest.mark.parametrize(
    "args",
    [
        ("parallel.static_graph=true", "model.norm=sync_batch"),
        ("parallel.strategy=fsdp", "train.accumulate=2", "train.ema={decay: 0.5}"),
    ],
    ids=["ddp", "fsdp"],
)
def test_a_frozen_backbone_stays_fixed_and_a_resumed_run_has_equal_weights(paceline, tmp_path: Path, args) -> None:
    args = (*ARGS, *args, "model.freeze=backbone")
    uninterrupted = paceline(*args, "--run-dir", "whole", "--json").result
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "result.json").unlink()
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000004")
    resumed = paceline(*args, "--run-dir", "cut", "--resume", "--json").result
    assert resumed["weights_sha256"] == uninterrupted["weights_sha256"]
    two, four = (
        load_file(path) for path in sorted((tmp_path / "cut" / "checkpoints").glob("step-*/model.safetensors"))
    )
    assert {key for key in two if not torch.equal(two[key], four[key])} == {"classifier.weight", "classifier.bias"}
    assert {int(four[key]) for key in four if key.endswith("num_batches_tracked")} == {0}
