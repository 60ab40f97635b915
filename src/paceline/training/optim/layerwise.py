"""Optimizers that scale the step of each layer: LARS, LAMB and NovoGrad."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paceline.training.optim.foreach import (
    LayerTensors,
    TensorList,
    add_scaled,
    l2_norms,
    layers_with_gradients,
    scalar_like,
)


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
