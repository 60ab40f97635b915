"""Schedule-free SGD: an average of all iterates instead of a decaying learning rate.

Defazio et al. 2024, The Road Less Scheduled (arXiv 2405.15682), Algorithm 1 with the warm-up of section 4.3. The
weights z take SGD's steps, x is their average, and gradients are computed between them, at y, the model's parameters:

    y = (1 - b) z + b x;    z <- z - lr (g(y) + d y);    x <- (1 - c) x + c z;    c = m^2 / (sum of m^2 so far)

where m is the largest learning rate so far. x is not stored, as it follows from y and z. Evaluation must use x;
BatchNorm statistics, computed at y, match it only approximately.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paceline.training.optim.foreach import (
    LayerTensors,
    add_scaled,
    layers_with_gradients,
    scalar_like,
)


class ScheduleFree(torch.optim.Optimizer):
    """SGD with iterate averaging and interpolation.

    The state of a group's first parameter has `lr_max` and `iterates` = 1 / c, which is exact, unlike the sum of m^2.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group, layers in layers_with_gradients(self):
            lr, parameters = group["lr"], layers.parameters
            share = self._update_weight(group)
            iterates = _iterate_buffers(layers)
            steps = torch._foreach_add(layers.gradients, parameters, alpha=group["weight_decay"])
            # y <- (1 - c) (y - lr (1 - b) u) + c (z - lr u) is the formula above without x.
            add_scaled(iterates, steps, -lr)
            add_scaled(parameters, steps, -lr * (1 - group["momentum"]))
            differences = torch._foreach_sub(iterates, parameters)
            torch._foreach_mul_(differences, share)
            torch._foreach_add_(parameters, differences)

    @torch.no_grad()
    def average_of(self, parameter: Tensor) -> Tensor:
        """Return the average x of `parameter` as a new tensor; before any step, a copy."""
        iterate = self.state[parameter].get("iterate") if parameter in self.state else None
        if iterate is None:
            return parameter.detach().clone()
        return torch.lerp(parameter.detach(), iterate, 1 - 1 / self.defaults["momentum"])

    def _update_weight(self, group: dict[str, Any]) -> Tensor:
        """Return c [], the newest iterate's weight in the average. Iterates at learning rate 0 have weight 0."""
        first = group["params"][0]
        state: dict[str, Tensor] = self.state[first]
        if "lr_max" not in state:
            state["lr_max"], state["iterates"] = scalar_like(first, 0), scalar_like(first, 0)
        # In place, so that captured steps find their state.
        lr_max, before = state["lr_max"], state["lr_max"].clone()
        lr_max.clamp_(min=group["lr"])
        decay = torch.where(before > 0, before / lr_max, 0.0)
        iterates = state["iterates"].mul_(decay.square()).add_(1)
        return iterates.reciprocal()


def _iterate_buffers(layers: LayerTensors) -> list[Tensor]:
    """Return z of every layer, initially the parameter."""
    for parameter, state in zip(layers.parameters, layers.states, strict=True):
        if "iterate" not in state:
            state["iterate"] = parameter.detach().clone(memory_format=torch.preserve_format)
    return [state["iterate"] for state in layers.states]
