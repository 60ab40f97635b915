"""Load the averaged weights of a checkpoint for evaluation."""

from pathlib import Path

from torch import nn

from paceline.recipe.schema import Recipe
from paceline.recipe.schema.optim import ScheduleFree
from paceline.train.average import Average, NoAverage, build_average
from paceline.train.optim import build_optimizer, layers_of
from paceline.train.persist import load_average
from paceline.train.precision import Precision


def keeps_average(recipe: Recipe) -> bool:
    """Return whether runs of `recipe` are evaluated by averaged weights: of `train.ema`, or of the optimizer."""
    return recipe.train.ema != "off" or isinstance(recipe.optim, ScheduleFree)


def averaged(recipe: Recipe, model: nn.Module, precision: Precision, checkpoint: Path) -> Average:
    """Return the average stored in `checkpoint` for `model`, which is on its device with the raw weights loaded.

    Raise `CheckpointError` if the checkpoint lacks it.
    """
    if not keeps_average(recipe):
        return NoAverage()
    # No other optimizer is built: it may be the user's own code, and is not needed here.
    is_schedule_free = isinstance(recipe.optim, ScheduleFree)
    named = precision.weights.named(model)
    layers, device = layers_of(recipe.optim, model), precision.device_type
    optimizer = build_optimizer(recipe.optim, named, device, layers) if is_schedule_free else None
    average = build_average(recipe.train.ema, model, optimizer, named)
    load_average(checkpoint, average, optimizer)
    return average
