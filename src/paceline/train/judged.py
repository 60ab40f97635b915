"""Load the model of a checkpoint with the weights that its run was evaluated by."""

from pathlib import Path

import torch
from torch import nn

from paceline.models.zoo import build_model
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.train import PrecisionName
from paceline.train.average import WeightAverage
from paceline.train.averaged import load_weight_average
from paceline.train.checkpoint import load_model, load_model_tensors, model_tensors
from paceline.train.facts import TrainedDataset
from paceline.train.precision import Precision

_ON_CPU: dict[str, PrecisionName] = dict.fromkeys(("tf32", "fp16", "fp16_master", "fp16_pure"), "fp32")
"""Replacements on a CPU for formats that only GPUs support."""


def eval_precision(name: PrecisionName, device: torch.device) -> PrecisionName:
    """Return the number format of the run's evaluation, or float32 if `device` does not support it."""
    return _ON_CPU.get(name, name) if device.type == "cpu" else name


def load_eval_model(
    recipe: Recipe,
    dataset: TrainedDataset,
    precision: Precision,
    device: torch.device,
    checkpoint: Path,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> nn.Module:
    """Return the model of `checkpoint` in evaluation mode with frozen parameters, with averaged weights if the run
    keeps any.

    Torch's random state is preserved.
    """
    # `model.norm=sync_batch` becomes plain BatchNorm, which is equivalent in evaluation.
    with torch.random.fork_rng(devices=[]):
        model = build_model(recipe.model, num_classes=dataset.info.num_classes, channels=dataset.info.channels)
    precision.cast_model(model)
    model.to(device).to(memory_format=memory_format)
    load_model(checkpoint, model)
    _load_averaged_weights(load_weight_average(recipe, model, precision, checkpoint), model)
    return model.eval().requires_grad_(False)


def _load_averaged_weights(average: WeightAverage, model: nn.Module) -> None:
    """Replace the weights of `model` by the averaged ones, if there are any."""
    if not average.is_enabled:
        return
    with average.swapped():
        averages = {name: tensor.clone() for name, tensor in model_tensors(model).items()}
    load_model_tensors(averages, model)
