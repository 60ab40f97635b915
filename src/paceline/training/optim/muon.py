"""Muon: SGD with orthogonalized momentum for filters and inner matrices, plain SGD for the rest.

Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks (https://kellerjordan.github.io/posts/muon).
In groups that are `is_matrix`, a filter bank w of `out` filters is one matrix [out, in k k] and changes by

    v <- m v + g;    w <- (1 - lr d) w - lr sqrt(max(1, out / (in k k))) orthogonal(v, or g + m v with `nesterov`)

The sum is not weighted by 1 - m as in torch.optim.Muon: orthogonalization discards the length. With `rescale`, as in
Jordan's CIFAR-10 speedruns (https://github.com/KellerJordan/cifar10-airbench), w is first scaled to the norm
sqrt(out), and the factor sqrt(max(...)) is left out. The other groups use SGD with the same sum, and decoupled decay
too: w <- (1 - lr d) w - lr (g + m v).
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paceline.training.optim.foreach import add_scaled, l2_norms, layers_with_gradients

_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315
"""Coefficients from the same source: steepest at 0 while bounded on [0, 1]."""
_MIN_NORM = 1e-7


def orthogonalize(matrices: list[Tensor], *, steps: int, dtype: torch.dtype) -> list[Tensor]:
    """Return `matrices` [M, N] in their own dtype with all singular values near 1; compute in `dtype`.

    A Newton-Schulz iteration, which raises small singular values fast but does not converge: after five steps they are
    between about 0.7 and 1.2.
    """
    # Batch matrices of one shape or its transpose: measured for ResNet-50 on a CPU with bfloat16 instructions
    # (benchmarks/optimizers.py), this saves a fifth of the time, and bfloat16 half of it.
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


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum in groups with `is_matrix`, SGD elsewhere; `dtype` is that of the iteration.

    Matrices must be whole: shards have other singular vectors.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        newton_schulz_steps: int,
        rescale: bool,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._newton_schulz_steps = newton_schulz_steps
        self._rescale = rescale
        self._dtype = dtype
        defaults = {"lr": lr, "momentum": 0.95, "nesterov": True, "weight_decay": 0.0, "is_matrix": True}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group, layers in layers_with_gradients(self):
            lr, momentum = group["lr"], group["momentum"]
            directions = layers.state_buffers("momentum")
            torch._foreach_mul_(directions, momentum)
            torch._foreach_add_(directions, layers.gradients)
            if group["nesterov"]:
                directions = list(torch._foreach_add(layers.gradients, directions, alpha=momentum))
            if group["is_matrix"]:
                directions = self._orthogonal_updates(layers.parameters, directions)
            if group["weight_decay"]:
                torch._foreach_mul_(layers.parameters, 1 - lr * group["weight_decay"])
            add_scaled(layers.parameters, directions, -lr)

    def _orthogonal_updates(self, parameters: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
        """Return the orthogonal updates of filter banks; with `rescale`, also scale the filters."""
        matrices = [direction.flatten(1) for direction in directions]
        updates = orthogonalize(matrices, steps=self._newton_schulz_steps, dtype=self._dtype)
        if self._rescale:
            _scale_to_filters(parameters)
        else:
            torch._foreach_mul_(updates, [update_scale(matrix.shape) for matrix in matrices])
        return [update.reshape(like.shape) for update, like in zip(updates, parameters, strict=True)]


def _scale_to_filters(parameters: list[Tensor]) -> None:
    """Scale each filter bank to norm sqrt(filters), in place, except for zeros."""
    lengths = l2_norms(parameters)
    scales = torch.where(lengths > 0, lengths.reciprocal(), 1.0).unbind()
    targets = [math.sqrt(parameter.shape[0]) for parameter in parameters]
    torch._foreach_mul_(parameters, torch._foreach_mul(scales, targets))
