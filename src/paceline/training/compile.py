"""Compile the model with `torch.compile`, and run a warm-up pass before the first step."""

import shutil
import warnings

import torch
from torch import nn

from paceline.core.errors import RecipeError
from paceline.data.transfer import DeviceTransfer
from paceline.recipe.plan import Plan
from paceline.training.nonfinite import SavedBuffers
from paceline.training.precision import Precision

MAX_IMAGE_SIZES = 8
"""`torch._dynamo.config.recompile_limit`: with more variants of a function, torch runs it eagerly."""
_COMPILERS = ("g++", "clang++", "c++", "gcc", "clang", "cc")


def compile_model(replica: nn.Module, mode: str, num_sizes: int = 1) -> nn.Module:
    """Return `replica` compiled in `mode`, or itself for `off`. Raise `RecipeError` without a C++ compiler."""
    if mode == "off":
        return replica
    if not any(shutil.which(name) for name in _COMPILERS):
        raise RecipeError(f"train.compile: {mode} needs a compiler (install g++, or set train.compile=off)")
    # torch 2.11 recommends TF32 for any float32 product on a GPU; the recipe decides that.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    # Code per image size is faster than code for any size. DDP is compiled from outside: torch then splits the backward
    # graph where gradients are sent; a graph of the model alone would delay communication to the end of backward.
    compiled = torch.compile(
        replica, mode=None if mode == "default" else mode, dynamic=False if num_sizes <= MAX_IMAGE_SIZES else None
    )
    assert isinstance(compiled, nn.Module)
    return compiled


def warmup_pass(
    model: nn.Module, replica: nn.Module, transfer: DeviceTransfer, precision: Precision, plan: Plan, step: int
) -> None:
    """Run forward and backward on zeros of the image size at step `step`; restore buffers and drop gradients."""
    size = plan.train_size(step)
    images = torch.zeros(plan.micro_batch, plan.channels, size, size, dtype=torch.uint8, device=transfer.device)
    buffers = SavedBuffers(model)
    with precision.autocast():
        logits = replica(transfer.normalize(images))
    logits.float().sum().backward()
    model.zero_grad(set_to_none=True)
    buffers.restore()
