"""NovoGrad: Adam's normalization with one number per layer.

Ginsburg et al. 2019, Stochastic Gradient Methods with Layer-wise Adaptive Moments (arXiv 1905.11286), Algorithm 1. With
decay d, the weights w of a layer change by

    v <- b2 v + (1 - b2) |g|^2, at first |g|^2;    m <- b1 m + s (g / (sqrt(v) + eps) + d w);    w <- w - lr m

where s is 1, or 1 - b1 with `grad_averaging`, from the first step on. v = 0 counts as uninitialized, as in timm: after
a first gradient of 0, the paper would divide the second by sqrt(1 - b2) times its norm.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paceline.train.optimizers.layers import LayerTensors, add_scaled, l2_norms, layers_with_gradients, restore_scalars


class NovoGrad(torch.optim.Optimizer):
    """Stochastic gradients normalized by layer."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        grad_averaging: bool,
    ) -> None:
        values = {"lr": lr, "betas": betas, "eps": eps, "grad_averaging": grad_averaging}
        super().__init__(groups, {"weight_decay": 0.0, **values})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group, layers in layers_with_gradients(self):
            beta1, beta2 = group["betas"]
            share = 1 - beta1 if group["grad_averaging"] else 1.0
            denominators = torch._foreach_sqrt(_mean_squares(layers, beta2))
            torch._foreach_add_(denominators, group["eps"])
            means = layers.state_buffers("mean")
            torch._foreach_mul_(means, beta1)
            torch._foreach_addcdiv_(means, layers.gradients, denominators, share)
            if group["weight_decay"]:
                torch._foreach_add_(means, layers.parameters, alpha=share * group["weight_decay"])
            add_scaled(layers.parameters, means, -group["lr"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        super().load_state_dict(state_dict)
        restore_scalars(self, state_dict)


def _mean_squares(layers: LayerTensors, beta: float) -> list[Tensor]:
    """Return the running mean of each layer's squared gradient norm, [] each, including the new gradients."""
    squares = l2_norms(layers.gradients).square().unbind()
    means = []
    for state, square in zip(layers.states, squares, strict=True):
        if "square" not in state:
            state["square"] = square.clone()
        means.append(state["square"])
    # A first gradient of 0, as behind a zero-initialized branch, does not predict the size of the next.
    firsts = [torch.where(square == 0, new, square) for square, new in zip(means, squares, strict=True)]
    torch._foreach_copy_(means, firsts)
    torch._foreach_lerp_(means, squares, 1 - beta)
    return means
