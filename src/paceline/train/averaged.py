"""Load the averaged weights of a checkpoint for evaluation."""

from pathlib import Path

from torch import nn

from paceline.recipe.schema import Recipe
from paceline.recipe.schema.optim import ScheduleFree
from paceline.train.average import NoWeightAverage, WeightAverage, build_weight_average
from paceline.train.optim import build_optimizer, layers_for_decay
from paceline.train.persist import load_average_tensors
from paceline.train.precision import Precision


def has_weight_average(recipe: Recipe) -> bool:
    """Return whether runs of `recipe` are evaluated by averaged weights: of `train.ema`, or of the optimizer."""
    return recipe.train.ema != "off" or isinstance(recipe.optim, ScheduleFree)


def load_weight_average(recipe: Recipe, model: nn.Module, precision: Precision, checkpoint: Path) -> WeightAverage:
    """Return the average stored in `checkpoint` for `model`, which is on its device with the raw weights loaded.

    Raise `CheckpointError` if the checkpoint lacks it.
    """
    if not has_weight_average(recipe):
        return NoWeightAverage()
    # No other optimizer is built: it may be the user's own code, and is not needed here.
    is_schedule_free = isinstance(recipe.optim, ScheduleFree)
    named = precision.weights.named_parameters(model)
    layers, device = layers_for_decay(recipe.optim, model), precision.device_type
    optimizer = build_optimizer(recipe.optim, named, device, layers) if is_schedule_free else None
    average = build_weight_average(recipe.train.ema, model, optimizer, named)
    load_average_tensors(checkpoint, average, optimizer)
    return average
