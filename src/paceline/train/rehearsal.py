"""A warm-up pass before the first step."""

import torch
from torch import nn

from paceline.data.placement import DeviceTransfer
from paceline.recipe.plan import Plan
from paceline.train.precision import Precision
from paceline.train.undo import SavedBuffers


def warmup_pass(
    model: nn.Module, replica: nn.Module, transfer: DeviceTransfer, precision: Precision, plan: Plan, step: int
) -> None:
    """Run forward and backward on black images of the size at global step `step`, then restore buffers and drop
    gradients.
    """
    size = plan.train_size(step)
    images = torch.zeros(plan.micro_batch, plan.channels, size, size, dtype=torch.uint8, device=transfer.device)
    buffers = SavedBuffers(model)
    with precision.autocast():
        logits = replica(transfer.normalize(images))
    logits.float().sum().backward()
    model.zero_grad(set_to_none=True)
    buffers.restore()
