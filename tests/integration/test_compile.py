"""Compiled by the real compiler, small networks train as they do as they are."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from paceline.models.airbench import global_max_pool

# torch 2.11's own compiler still uses what it advises others to leave, under Python 3.12.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
SMALL = (
    *("synthetic", "data.source.num_images=64", "data.source.num_val_images=16", "data.source.image_size=16"),
    *("data.batch_size=16", "model.width=0.25", "train.epochs=auto", "train.steps=3", "train.eval_every=off"),
    *("checkpoint.every=off", "log.tensorboard=off", "log.every=1st", "parallel.threads=1", "data.workers=0"),
)


def test_in_16_bits_compiled_code_has_the_gradient_at_the_largest_feature() -> None:
    """What it computes anew in its backward pass is not rounded: whoever compares finds the largest nowhere there."""
    torch.manual_seed(0)
    norm, features = nn.BatchNorm2d(8), torch.randn(16, 8, 3, 3)

    def gradient(work: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = features.clone().requires_grad_()
        work(leaf).float().square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    def tail(features: Tensor) -> Tensor:
        return global_max_pool(F.gelu(norm(features.bfloat16())))

    # Some of what is summed up is rounded to 8 bits on the way in one of the two, and not in the other.
    assert_close(gradient(torch.compile(tail)), gradient(tail), rtol=0.02, atol=0.02)


@pytest.mark.long
def test_two_ranks_compiled_train_as_they_do_uncompiled(paceline, tmp_path: Path, lines_of) -> None:
    """DDP is compiled from outside, so its buckets leave in the middle of the backward pass."""
    losses = {}
    for mode in ("off", "default"):
        ended = paceline("train", *SMALL, f"train.compile={mode}", "--ranks", "2", "--run-dir", mode)
        assert ended.code == 0, ended.err
        losses[mode] = [line["loss"] for line in lines_of(tmp_path / mode / "steps.jsonl")]
    assert len(losses["off"]) == 3
    assert losses["default"] == pytest.approx(losses["off"], rel=1e-4)  # float32, summed in another order for 3 steps
    assert json.loads((tmp_path / "default" / "result.json").read_text())["account"]["compile_s"] > 0
