"""Build the optimizer: which parameters decay, and which algorithm moves them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from paceline.recipe.schema.optim import Adam, AdamW, OptimSection, Sgd


def build_optimizer(section: OptimSection, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of `model`'s trainable parameters. The learning rate is set before every step."""
    groups = parameter_groups(model, section.weight_decay, decay_norm_and_bias=section.decay_norm_and_bias)
    match section:
        case Sgd():
            return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum, nesterov=section.nesterov)
        case AdamW():
            return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps)
        case Adam():
            return torch.optim.Adam(groups, lr=section.lr, betas=section.betas, eps=section.eps)


def parameter_groups(model: nn.Module, weight_decay: float, *, decay_norm_and_bias: bool) -> list[dict[str, Any]]:
    """Return groups that decay and do not. Norms and biases are the parameters of fewer than two dimensions."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if decay_norm_and_bias or parameter.ndim >= 2]
    chosen = {id(parameter) for parameter in decayed}
    spared = [parameter for parameter in trainable if id(parameter) not in chosen]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def set_lr(groups: Iterable[dict[str, Any]], lr: float) -> None:
    """Give every parameter group the learning rate `lr`."""
    for group in groups:
        group["lr"] = lr
