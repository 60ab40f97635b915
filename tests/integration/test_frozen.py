"""Ranks that train a part of a network leave the rest as it was, and resumed they end with the bits of a whole run."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

WORDS = (
    *("train", "synthetic", "model.width=0.1", "data.source.num_images=48", "data.source.num_val_images=12"),
    *("data.batch_size=12", "data.workers=0", "train.steps=4", "train.eval_every=3st", "checkpoint.every=2st"),
    *("parallel.threads=1", "log.tensorboard=off", "log.report=off", "measure.telemetry=off", "--ranks", "2"),
)


@pytest.mark.parametrize(
    "words",
    [
        ("parallel.static_graph=true", "model.norm=sync_batch"),
        ("parallel.strategy=fsdp", "train.accumulate=2", "train.ema={decay: 0.5}"),
    ],
    ids=["ddp", "fsdp"],
)
def test_ranks_with_a_frozen_backbone_move_the_classifier_alone(paceline, tmp_path: Path, words) -> None:
    words = (*WORDS, *words, "model.freeze=backbone")
    whole = paceline(*words, "--run-dir", "whole", "--json").result
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "result.json").unlink()
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000004")
    resumed = paceline(*words, "--run-dir", "cut", "--resume", "--json").result
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    two, four = (
        load_file(path) for path in sorted((tmp_path / "cut" / "checkpoints").glob("step-*/model.safetensors"))
    )
    assert {key for key in two if not torch.equal(two[key], four[key])} == {"classifier.weight", "classifier.bias"}
    assert {int(four[key]) for key in four if key.endswith("num_batches_tracked")} == {0}
