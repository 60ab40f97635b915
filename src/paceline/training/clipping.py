"""Adaptive gradient clipping: limit each unit's gradient relative to its weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError
from paceline.models.structure import find_classifier
from paceline.recipe.schema.base import Off
from paceline.training.precision import MasterWeights

_MIN_WEIGHT_NORM = 1e-3
_MIN_GRADIENT_NORM = 1e-6


@dataclass(frozen=True)
class AdaptiveClip:
    """Clip the gradients of `parameters` in place, as timm's `adaptive_clip_grad`.

    Brock et al. 2021 (arXiv 2102.06171), equation 3: the gradient of a unit, a row of a weight or a whole bias, gets at
    most `factor` times the norm of its weights; weights shorter than 0.001 count as that long.
    """

    parameters: Sequence[nn.Parameter]
    factor: float

    @torch.no_grad()
    def __call__(self) -> None:
        """Clip those that have a gradient."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                longest = _unit_norms(parameter).clamp_(min=_MIN_WEIGHT_NORM).mul_(self.factor)
                norms = _unit_norms(parameter.grad)
                clipped = parameter.grad * (longest / norms.clamp(min=_MIN_GRADIENT_NORM))
                parameter.grad.copy_(torch.where(norms < longest, parameter.grad, clipped))


def _unit_norms(values: Tensor) -> Tensor:
    """Return the L2 norm of each row, [N, 1, ...] for [N, ...], or [] of a vector, in at least float32."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    rows = tuple(range(1, values.ndim)) or None
    norms: Tensor = torch.linalg.vector_norm(values, dim=rows, keepdim=rows is not None, dtype=dtype)
    return norms


def build_adaptive_clip(
    factor: float | Off, model: nn.Module, master: MasterWeights | None, num_classes: int
) -> AdaptiveClip | None:
    """Return the clipping of `train.clip_agc` for `model`, or for its `master` weights; None without.

    The classifier is not clipped, as in the paper. Raise `RecipeError` if nothing else is trained.
    """
    if factor == "off":
        return None
    classifier = tuple(f"{layer}." for layer in find_classifier(model, num_classes))
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    inner = [each for name, each in trained if not name.startswith(classifier)]
    clipped = [master.copy_of(each) if master else each for each in inner]
    if not clipped:
        raise RecipeError(
            f"train.clip_agc: {factor:g} has no effect, as the classifier alone is trained (set train.clip_agc=off)"
        )
    return AdaptiveClip(clipped, factor)
