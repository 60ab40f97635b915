"""Load the model of a checkpoint with the weights that its run was evaluated by."""

from functools import partial
from pathlib import Path

import torch
from torch import nn

from paceline.models.build import build_model
from paceline.models.lora import merge_adapters
from paceline.recipe.plan import train_image_size
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.optim import OptimSection, ScheduleFree
from paceline.recipe.schema.train import PrecisionName, Train
from paceline.training.checkpoint import ConvertTensors, load_model, load_model_tensors, model_tensors
from paceline.training.ema import WeightAverage, build_weight_average
from paceline.training.optim.build import build_optimizer, layers_for_decay
from paceline.training.precision import Precision
from paceline.training.saver import load_average_tensors
from paceline.training.trained_dataset import TrainedDataset

_ON_CPU: dict[str, PrecisionName] = dict.fromkeys(("tf32", "fp16", "fp16_master", "fp16_pure"), "fp32")
"""Replacements on a CPU for formats that only GPUs support."""


def has_weight_average(train: Train, optim: OptimSection) -> bool:
    """Return whether a run evaluates averaged weights, of `train.ema` or the optimizer."""
    return train.ema != "off" or isinstance(optim, ScheduleFree)


def load_weight_average(
    train: Train,
    optim: OptimSection,
    model: nn.Module,
    precision: Precision,
    checkpoint: Path,
    convert: ConvertTensors = dict,
) -> WeightAverage | None:
    """Return the average in `checkpoint` for `model` with raw weights; None if runs keep no average.

    Raise `CheckpointError` if the checkpoint lacks it.
    """
    if not has_weight_average(train, optim):
        return None
    # No other optimizer is built: it may be the user's own code, and is not needed here.
    is_schedule_free = isinstance(optim, ScheduleFree)
    named = precision.optimized_parameters(model)
    optimizer = None
    if is_schedule_free:
        optimizer = build_optimizer(optim, named, precision.device_type, layers_for_decay(optim, model))
    average = build_weight_average(train.ema, model, optimizer, named)
    load_average_tensors(checkpoint, average, optimizer, convert)
    return average


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
    """Return the frozen model of `checkpoint` in evaluation mode, with averaged weights if the run has any.

    Torch's random state is preserved.
    """
    # `model.norm=sync_batch` becomes plain BatchNorm, which is equivalent in evaluation.
    with torch.random.fork_rng(devices=[]):
        model = build_model(
            recipe.model,
            num_classes=dataset.info.num_classes,
            channels=dataset.info.channels,
            image_size=train_image_size(recipe.data, dataset.info),
        )
    precision.cast_model(model)
    model.to(device).to(memory_format=memory_format)
    merge = partial(merge_adapters, recipe.model.lora)
    load_model(checkpoint, model, convert=merge)
    average = load_weight_average(recipe.train, recipe.optim, model, precision, checkpoint, merge)
    _load_averaged_weights(average, model)
    return model.eval().requires_grad_(False)


def _load_averaged_weights(average: WeightAverage | None, model: nn.Module) -> None:
    if average is None:
        return
    with average.swapped():
        averages = {name: tensor.clone() for name, tensor in model_tensors(model).items()}
    load_model_tensors(averages, model)
