"""Small models train the same with and without torch.compile."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from paceline.models.airbench import global_max_pool

# torch 2.11's own compiler still uses an API that it deprecates under Python 3.12.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
SMALL = (
    *("synthetic", "data.source.num_images=64", "data.source.num_val_images=16", "data.source.image_size=16"),
    *("data.batch_size=16", "model.width=0.25", "train.epochs=auto", "train.steps=3", "train.eval_every=off"),
    *("checkpoint.every=off", "log.tensorboard=off", "log.every=1st", "parallel.threads=1", "data.workers=0"),
)


def test_compiled_max_pool_routes_the_bf16_gradient_to_the_largest_feature() -> None:
    """The backward pass recomputes features unrounded, so none may equal the rounded maximum."""
    torch.manual_seed(0)
    norm, features = nn.BatchNorm2d(8), torch.randn(16, 8, 3, 3)

    def gradient(work: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = features.clone().requires_grad_()
        work(leaf).float().square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    def tail(features: Tensor) -> Tensor:
        return global_max_pool(F.gelu(norm(features.bfloat16())))

    # Only one of the two rounds some partial sums to the 8 bits of bfloat16.
    assert_close(gradient(torch.compile(tail)), gradient(tail), rtol=0.02, atol=0.02)


@pytest.mark.long
def test_compiled_and_eager_ddp_have_equal_losses(paceline, tmp_path: Path, lines_of) -> None:
    """DDP is compiled from outside, so its buckets are sent in the middle of the backward pass."""
    losses = {}
    for mode in ("off", "default"):
        completed = paceline("train", *SMALL, f"train.compile={mode}", "--ranks", "2", "--run-dir", mode)
        assert completed.code == 0, completed.err
        losses[mode] = [line["loss"] for line in lines_of(tmp_path / mode / "steps.jsonl")]
    assert len(losses["off"]) == 3
    assert losses["default"] == pytest.approx(losses["off"], rel=1e-4)  # float32, summed in another order for 3 steps
    assert json.loads((tmp_path / "default" / "result.json").read_text())["account"]["compile_s"] > 0
