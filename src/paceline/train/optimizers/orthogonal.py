"""Make matrices orthogonal, roughly and fast: all singular values near 1, the singular vectors as they were.

The Newton-Schulz iteration of Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks
(https://kellerjordan.github.io/posts/muon). Its quintic lifts small singular values fast, and in exchange does not
converge: after five steps they lie between about 0.7 and 1.2.
"""

import math

import torch
from torch import Tensor

_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315
"""Coefficients of the iteration, from the same source: the steepest at 0 that stays bounded on [0, 1]."""
_EPS = 1e-7
"""Least norm that is divided by."""


def orthogonalise(matrices: list[Tensor], *, steps: int, dtype: torch.dtype) -> list[Tensor]:
    """Return `matrices` [M, N] made orthogonal, in their own format; the iteration computes in `dtype`.

    Those of one shape, either way up, go through it as one batch. Measured on ResNet-50's filters on a CPU with
    bfloat16 instructions (benchmarks/optimizers.py), batches save a fifth of the time, and bfloat16 half of it.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for place, matrix in enumerate(matrices):
        places.setdefault(tuple(sorted(matrix.shape)), []).append(place)
    found: dict[int, Tensor] = {}
    for same in places.values():
        batch = torch.stack([_wide(matrices[place]) for place in same])
        done = _newton_schulz(batch, steps, dtype)
        found.update(zip(same, done.unbind(), strict=True))
    return [_upright(found[place], matrix) for place, matrix in enumerate(matrices)]


def _newton_schulz(batch: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return X [B, M, N] with M <= N after `steps` times X <- a X + b (X X') X + c (X X')^2 X."""
    lengths = torch.linalg.vector_norm(batch, dim=(-2, -1), keepdim=True)
    x: Tensor = (batch / lengths.clamp(min=_EPS)).to(dtype)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=_CUBIC, alpha=_QUINTIC)
        x = torch.baddbmm(x, polynomial, x, beta=_LINEAR)
    return x


def _wide(matrix: Tensor) -> Tensor:
    return matrix.mT if _is_tall(matrix) else matrix


def _upright(wide: Tensor, like: Tensor) -> Tensor:
    return (wide.mT if _is_tall(like) else wide).to(like.dtype)


def _is_tall(matrix: Tensor) -> bool:
    rows, columns = matrix.shape
    return rows > columns


def length_factor(shape: torch.Size) -> float:
    """Return sqrt(max(1, rows / columns)), which makes a tall update as long as its outputs need (same source)."""
    rows, columns = shape
    return math.sqrt(max(1.0, rows / columns))
