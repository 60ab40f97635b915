"""LARS: momentum SGD with each layer's step scaled by the norm of its weights.

You, Gitman, Ginsburg 2017, Large Batch Training of Convolutional Networks (arXiv 1708.03888), Algorithm 1. With the
learning rate lr, the trust coefficient t, the decay d and the momentum m, a layer's weights w change by

    u = g + d w;    r = t |w| / (|g| + d |w| + eps);    v <- m v + lr r u;    w <- w - v

The learning rate is inside the momentum, as in the paper: later changes do not affect earlier steps. `nesterov`, which
the paper does not have, looks ahead: w <- w - (m v + lr r u). In groups that are not `layerwise`, and where a norm is
0, r = 1: biases start at 0 and would never leave it.
"""

from collections.abc import Iterable
from typing import Any

import torch

from paceline.train.optimizers.layers import add_scaled, l2_norms, layers_with_gradients


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling. Groups carry `layerwise`."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, momentum: float, nesterov: bool, trust: float, eps: float
    ) -> None:
        values = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "trust": trust, "eps": eps}
        super().__init__(groups, {"weight_decay": 0.0, "layerwise": True, **values})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group, layers in layers_with_gradients(self):
            lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
            updates = torch._foreach_add(layers.gradients, layers.parameters, alpha=decay)
            if group["layerwise"]:
                weights, gradients = l2_norms(layers.parameters), l2_norms(layers.gradients)
                ratios = group["trust"] * weights / (gradients + decay * weights + group["eps"])
                ratios = torch.where((weights > 0) & (gradients > 0), ratios, 1.0)
                torch._foreach_mul_(updates, ratios.unbind())
            velocities = layers.state_buffers("momentum")
            torch._foreach_mul_(velocities, momentum)
            add_scaled(velocities, updates, lr)
            if group["nesterov"]:
                torch._foreach_add_(layers.parameters, velocities, alpha=-momentum)
                add_scaled(layers.parameters, updates, -lr)
            else:
                torch._foreach_sub_(layers.parameters, velocities)
