"""LAMB: Adam with each layer's step scaled by the norm of its weights.

You et al. 2020, Large Batch Optimization for Deep Learning (arXiv 1904.00962), Algorithm 2, with phi the identity.
With the bias-corrected mean m and square v of the gradient, the weights w of a layer change by

    u = m / (sqrt(v) + eps) + d w;    w <- w - lr u |w| / |u|

In groups that are not `layerwise` the ratio of the norms is 1, and so it is where a norm is 0. The paper scales all
layers; NVIDIA's and timm's exclude those without decay (biases and norms in their recipes), because a layer that starts
at 0 hardly leaves it. Here it depends on the dimensions alone, so that changing the decay does not change step sizes.
Gradients are not clipped, unlike in NVIDIA's.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paceline.train.optimizers.layers import (
    TensorList,
    add_scaled,
    l2_norms,
    layers_with_gradients,
    restore_scalars,
    scalar_like,
)


class Lamb(torch.optim.Optimizer):
    """Layer-wise adaptive moments. Groups have `layerwise`; the first parameter of a group holds its `updates`."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "layerwise": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group, layers in layers_with_gradients(self):
            beta1, beta2 = group["betas"]
            means, squares = layers.state_buffers("mean"), layers.state_buffers("square")
            torch._foreach_lerp_(means, layers.gradients, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, layers.gradients, layers.gradients, 1 - beta2)
            updates = self._count_update(group)
            correction = _bias_correction(beta1, updates)
            # c1 (sqrt(v / c2) + eps), so that m is divided once; c1 and c2 are the bias corrections. `eps`
            # is added as a host number: for a tensor [], `_foreach_add_` would synchronize with the device.
            denominators = torch._foreach_sqrt(squares)
            torch._foreach_mul_(denominators, _bias_correction(beta2, updates).rsqrt())
            torch._foreach_add_(denominators, group["eps"])
            torch._foreach_mul_(denominators, correction)
            steps = torch._foreach_div(means, denominators)
            if group["weight_decay"]:
                torch._foreach_add_(steps, layers.parameters, alpha=group["weight_decay"])
            if group["layerwise"]:
                weights, lengths = l2_norms(layers.parameters), l2_norms(list(steps))
                ratios = torch.where((weights > 0) & (lengths > 0), weights / lengths, 1.0)
                _add_scaled_by_ratio(layers.parameters, steps, ratios, -group["lr"])
            else:
                add_scaled(layers.parameters, steps, -group["lr"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        super().load_state_dict(state_dict)
        restore_scalars(self, state_dict)

    def _count_update(self, group: dict[str, Any]) -> Tensor:
        first = group["params"][0]
        state: dict[str, Tensor] = self.state[first]
        if "updates" not in state:
            state["updates"] = scalar_like(first, 0)
        return state["updates"].add_(1)


def _add_scaled_by_ratio(tensors: list[Tensor], steps: TensorList, ratios: Tensor, factor: float | Tensor) -> None:
    """Add `factor` times ratio times step of each layer to `tensors`, in place."""
    if isinstance(factor, Tensor):
        torch._foreach_addcmul_(tensors, steps, (ratios * factor).unbind())
    else:
        torch._foreach_addcmul_(tensors, steps, ratios.unbind(), factor)


def _bias_correction(beta: float, updates: Tensor) -> Tensor:
    """Return 1 - beta^updates [], by expm1, as float32 would keep three digits of 1 - 0.999 only."""
    return -torch.expm1(updates * (math.log(beta) if beta else -math.inf))
