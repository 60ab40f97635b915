"""Orthogonalize matrices approximately: all singular values near 1, singular vectors unchanged.

The Newton-Schulz iteration of Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks
(https://kellerjordan.github.io/posts/muon). Its quintic raises small singular values fast but does not converge: after
five steps they are between about 0.7 and 1.2.
"""

import math

import torch
from torch import Tensor

_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315
"""Coefficients of the iteration, from the same source: steepest at 0 while bounded on [0, 1]."""
_MIN_NORM = 1e-7
"""Smallest divisor."""


def orthogonalize(matrices: list[Tensor], *, steps: int, dtype: torch.dtype) -> list[Tensor]:
    """Return `matrices` [M, N] orthogonalized, in their own dtype; the iteration computes in `dtype`.

    Matrices of one shape or its transpose are batched. Measured for ResNet-50 on a CPU with bfloat16 instructions
    (benchmarks/optimizers.py): batching saves a fifth of the time, bfloat16 half of it.
    """
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_shape.setdefault(tuple(sorted(matrix.shape)), []).append(index)
    orthogonal: dict[int, Tensor] = {}
    for indices in by_shape.values():
        batch = torch.stack([_as_wide(matrices[index]) for index in indices])
        result = _newton_schulz(batch, steps, dtype)
        orthogonal.update(zip(indices, result.unbind(), strict=True))
    return [_restore_orientation(orthogonal[index], matrix) for index, matrix in enumerate(matrices)]


def _newton_schulz(batch: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return X [B, M, N] with M <= N after `steps` times X <- a X + b (X X') X + c (X X')^2 X."""
    lengths = torch.linalg.vector_norm(batch, dim=(-2, -1), keepdim=True)
    x: Tensor = (batch / lengths.clamp(min=_MIN_NORM)).to(dtype)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=_CUBIC, alpha=_QUINTIC)
        x = torch.baddbmm(x, polynomial, x, beta=_LINEAR)
    return x


def _as_wide(matrix: Tensor) -> Tensor:
    return matrix.mT if _is_tall(matrix) else matrix


def _restore_orientation(wide: Tensor, like: Tensor) -> Tensor:
    return (wide.mT if _is_tall(like) else wide).to(like.dtype)


def _is_tall(matrix: Tensor) -> bool:
    rows, columns = matrix.shape
    return rows > columns


def update_scale(shape: torch.Size) -> float:
    """Return sqrt(max(1, rows / columns)), the scale of a tall update (same source)."""
    rows, columns = shape
    return math.sqrt(max(1.0, rows / columns))
