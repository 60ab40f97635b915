"""Compile what is called in training. The model itself stays as it is, so names in checkpoints do too."""

import shutil

import torch
from torch import nn

from paceline.core.errors import RecipeError

_COMPILERS = ("g++", "clang++", "c++", "gcc", "clang", "cc")


def compiled(replica: nn.Module, mode: str) -> nn.Module:
    """Return `replica` compiled in `mode`, or itself for `off`; it is compiled when it first runs.

    DDP is compiled from outside: torch then splits the backward pass where gradients are sent, which one graph of the
    model alone would hold back to its end. Raise `RecipeError` where torch would find no compiler.
    """
    if mode == "off":
        return replica
    if not any(shutil.which(name) for name in _COMPILERS):
        raise RecipeError(f"train.compile: {mode} needs a compiler (install g++, or set train.compile=off)")
    made = torch.compile(replica, mode=None if mode == "default" else mode)
    assert isinstance(made, nn.Module)
    return made
