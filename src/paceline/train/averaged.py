"""The averaged weights that a checkpoint keeps, for whoever judges its model or asks it, and does not train it."""

from pathlib import Path

from torch import nn

from paceline.recipe.schema import Recipe
from paceline.recipe.schema.optim import ScheduleFree
from paceline.train.average import Average, NoAverage, build_average
from paceline.train.optim import build_optimizer, layers_of
from paceline.train.persist import load_average
from paceline.train.precision import Precision


def keeps_average(recipe: Recipe) -> bool:
    """Return whether a run of `recipe` is judged by averaged weights: those of `train.ema`, or its optimizer's own."""
    return recipe.train.ema != "off" or isinstance(recipe.optim, ScheduleFree)


def averaged(recipe: Recipe, model: nn.Module, precision: Precision, checkpoint: Path) -> Average:
    """Return the average that `checkpoint` keeps of `model`, which is on its device and has the raw weights already.

    No optimizer is built but the one that keeps the average itself: another, which may be somebody's code, has no part
    in it. Raise `CheckpointError` where an average is to be and is not kept.
    """
    if not keeps_average(recipe):
        return NoAverage()
    is_optimizers = isinstance(recipe.optim, ScheduleFree)
    named = precision.weights.named(model)
    layers, device = layers_of(recipe.optim, model), precision.device_type
    optimizer = build_optimizer(recipe.optim, named, device, layers) if is_optimizers else None
    average = build_average(recipe.train.ema, model, optimizer, named)
    load_average(checkpoint, average, optimizer)
    return average
