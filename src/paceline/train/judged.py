"""The network of a checkpoint with the weights that its run was judged by, for whoever asks it or starts from it."""

from pathlib import Path

import torch
from torch import nn

from paceline.models.zoo import build_model
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.train import PrecisionName
from paceline.train.average import Average
from paceline.train.averaged import averaged
from paceline.train.checkpoint import load_model, load_model_tensors, model_tensors
from paceline.train.facts import Facts
from paceline.train.precision import Precision

_ON_CPU: dict[str, PrecisionName] = dict.fromkeys(("tf32", "fp16", "fp16_master", "fp16_pure"), "fp32")
"""What stands in on a CPU for a number format that only GPUs compute in."""


def precision_on(name: PrecisionName, device: torch.device) -> PrecisionName:
    """Return the number format a run was evaluated in, or float32 where `device` lacks it."""
    return _ON_CPU.get(name, name) if device.type == "cpu" else name


def judged_network(
    recipe: Recipe,
    facts: Facts,
    precision: Precision,
    device: torch.device,
    checkpoint: Path,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> nn.Module:
    """Return the network with the judged weights of `checkpoint`, in evaluation mode, its parameters at rest.

    They are the averaged ones where the run keeps any. `model.norm=sync_batch` is a plain batch norm here: in
    evaluation they are the same. Torch's random state stays as it is.
    """
    with torch.random.fork_rng(devices=[]):
        model = build_model(recipe.model, num_classes=facts.info.num_classes, channels=facts.info.channels)
    precision.lower(model)
    model.to(device).to(memory_format=memory_format)
    load_model(checkpoint, model)
    _take_average(averaged(recipe, model, precision, checkpoint), model)
    return model.eval().requires_grad_(False)


def _take_average(average: Average, model: nn.Module) -> None:
    """Put the averaged weights into `model` for good, where there are any."""
    if not average.exists:
        return
    with average.swapped():
        judged = {name: tensor.clone() for name, tensor in model_tensors(model).items()}
    load_model_tensors(judged, model)
