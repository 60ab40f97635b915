"""Compile what is called in training. The model itself stays as it is, so names in checkpoints do too."""

import shutil
import warnings

import torch
from torch import nn

from paceline.core.errors import RecipeError

MOST_SIZES = 8
"""What torch compiles a function for, `torch._dynamo.config.recompile_limit`, before it runs as it is."""
_COMPILERS = ("g++", "clang++", "c++", "gcc", "clang", "cc")


def compiled(replica: nn.Module, mode: str, num_sizes: int = 1) -> nn.Module:
    """Return `replica` compiled in `mode`, or itself for `off`; it is compiled when it first runs.

    Images come in `num_sizes`: for each there is code of its own, which is faster than code for any size, unless there
    are more than torch compiles one function for.

    DDP is compiled from outside: torch then splits the backward pass where gradients are sent, which one graph of the
    model alone would hold back to its end. Raise `RecipeError` where torch would find no compiler.
    """
    if mode == "off":
        return replica
    if not any(shutil.which(name) for name in _COMPILERS):
        raise RecipeError(f"train.compile: {mode} needs a compiler (install g++, or set train.compile=off)")
    # torch 2.11 advises TF32 wherever float32 is multiplied on a GPU; the recipe has said what it wants.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    made = torch.compile(
        replica, mode=None if mode == "default" else mode, dynamic=False if num_sizes <= MOST_SIZES else None
    )
    assert isinstance(made, nn.Module)
    return made
