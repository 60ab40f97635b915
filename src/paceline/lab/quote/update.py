"""The kernels that follow the backward pass: norm and clipping of the gradient, optimizer, and weight average.

They read and write parameters, gradients and states in fp32. A fused or foreach operation updates many tensors per
launch: about 20 of a network, by the limit of a kernel's arguments in torch, which was not measured.
"""

import math
from collections.abc import Mapping
from typing import Final

from paceline.models.flops import Kernel, StepKernels
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.optim import Adam, OptimSection, Sgd
from paceline.recipe.schema.train import Ema

_PER_LAUNCH: Final = 20
"""Tensors that one launch of a fused or foreach operation updates."""
_OPERATIONS: Final[Mapping[str, tuple[float, int]]] = {
    "sgd": (14.0, 5),
    "adam": (18.0, 10),
    "adamw": (18.0, 10),
    "rmsprop": (20.0, 8),
    "novograd": (14.0, 8),
    "lars": (17.0, 8),
    "lamb": (24.0, 14),
    "schedule_free": (14.0, 6),
}
"""Numbers of fp32 read and written per parameter, and operations, of an optimizer that is not fused: of momentum and
weight decay, from the operations that torch's and paceline's own run. Others count as `adamw`.
"""
_FUSED_PASSES: Final[Mapping[str, float]] = {"sgd": 5.0, "adam": 7.0, "adamw": 7.0}
_NORM_PASSES: Final = 1.0
_CLIP_PASSES: Final = 2.0
_ADAPTIVE_CLIP: Final = (11.0, 10)
"""Passes and operations per tensor of adaptive clipping, which works on one tensor at a time."""
_AVERAGE_PASSES: Final = 3.0


def is_known(section: OptimSection) -> bool:
    """Return whether the kernels of the optimizer are counted as it runs them."""
    return section.name in _OPERATIONS


def list_optimizer_kernels(step: StepKernels, name: str, implementation: str) -> list[Kernel]:
    """Return the kernels of an optimizer: `implementation` is `fused`, `foreach`, or `loop` over the tensors."""
    passes, number = _OPERATIONS.get(name, _OPERATIONS["adamw"])
    if implementation == "fused":
        return _list_kernels(step, _FUSED_PASSES[name], 1)
    if implementation == "foreach":
        return _list_kernels(step, passes, number)
    return _list_kernels(step, passes, number, tensors_per_launch=1)


def list_update_kernels(step: StepKernels, recipe: Recipe) -> list[Kernel]:
    """Return the kernels of an update by the recipe; those of an average that is not updated every step cost less."""
    train, optim = recipe.train, recipe.optim
    implementation = "foreach"
    if isinstance(optim, Sgd | Adam):
        implementation = "fused" if optim.implementation == "auto" else optim.implementation
    kernels = _list_kernels(step, _NORM_PASSES, 1)
    if train.clip_norm != "off":
        kernels += _list_kernels(step, _CLIP_PASSES, 1)
    if train.clip_agc != "off":
        kernels += _list_kernels(step, *_ADAPTIVE_CLIP, tensors_per_launch=1)
    kernels += list_optimizer_kernels(step, optim.name, implementation)
    if isinstance(train.ema, Ema):
        kernels += _list_kernels(step, _AVERAGE_PASSES, 1, every=train.ema.every)
    return kernels


def _list_kernels(
    step: StepKernels, passes: float, operations: int, tensors_per_launch: int = _PER_LAUNCH, every: int = 1
) -> list[Kernel]:
    """Return the kernels of a step, on average over `every` steps of which one runs them."""
    if not step.trained_tensors:
        return []
    launches = math.ceil(operations * math.ceil(step.trained_tensors / tensors_per_launch) / every)
    return [Kernel("elementwise", 0.0, 0.0, 4 * passes * step.trained_params / every / launches, ())] * launches
