"""What weights a new run begins with: fresh ones, those of a file, or those that another run was judged by."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from paceline.core.errors import CheckpointError, RecipeError
from paceline.core.files import open_to_read
from paceline.core.rundir import RunDir, is_run
from paceline.data.sources.places import expanded, is_folder
from paceline.models.pretrained import copy_weights, load_weights
from paceline.recipe.load import load
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.model import Model
from paceline.recipe.schema.own import is_own_model
from paceline.train.averaged import keeps_average
from paceline.train.checkpoint import Checkpoints, Keep, model_tensors, read_state, weights_sha256
from paceline.train.facts import read_facts
from paceline.train.judged import judged_network, precision_on
from paceline.train.precision import build_precision

_CHOSEN: Final = ("last", "best")
_CPU: Final = torch.device("cpu")
_FACT: Final = "started_from"


@dataclass(frozen=True)
class Beginning:
    """A sentence on what was taken, None where nothing was, and the same for programs: `started_from`.

    `path` as the recipe has it, the `checkpoint` where it is a run's, and a `sha256`: of the file, or of the weights of
    a run as `weights_sha256` of a result is.
    """

    note: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def checkpoint_to_start_from(weights: str) -> str:
    """Return the checkpoint that `weights` names, nothing where it names no folder. Only rank 0 need look.

    A run directory stands for its last checkpoint, as `paceline eval` takes it; RUN/checkpoints/best, or last or a
    step's folder, for that one. Raise `RecipeError` for a folder that is neither, or where there is no such checkpoint.
    """
    if weights == "off":
        return ""
    place = expanded(weights)
    above = place.parent.parent
    run, name = (above, place.name) if place.parent == RunDir(above).checkpoints else (place, "last")
    if not is_run(run):
        if not is_folder(place):
            return ""
        raise RecipeError(
            f"model.weights: {weights}: is neither a run directory nor a checkpoint of one "
            "(give RUN, RUN/checkpoints/best or a step's folder there, a .safetensors or a .pth)"
        )
    if name not in _CHOSEN:
        if not os.path.lexists(place):
            raise RecipeError(f"model.weights: {weights}: no such checkpoint (see {place.parent})")
        return str(place) if is_folder(place) else ""
    try:
        return str(Checkpoints(RunDir(run).checkpoints, Keep(1)).named(name))
    except CheckpointError as error:
        raise RecipeError(f"model.weights: {error}") from None


def begin(section: Model, model: nn.Module, checkpoint: str) -> Beginning:
    """Load into `model`, in place, what `section.weights` names, a `checkpoint` where there is one.

    Raise `RecipeError` as `load_weights` does, and `CheckpointError` for a checkpoint that is damaged.
    """
    weights = section.weights
    if weights == "off":
        return Beginning()
    facts = {"path": weights}
    if not checkpoint:
        sentence = load_weights(model, weights, section.name)
        with open_to_read(expanded(weights)) as file:
            facts["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        return Beginning(f"model.weights: {weights}: {sentence}", {_FACT: facts})
    path = Path(checkpoint)
    own = load(str(path.parent.parent)).recipe
    network = _network(own, section, path)
    given = model_tensors(network)
    sentence = copy_weights(model, given, weights, section.name)
    which = "averaged weights" if keeps_average(own) else "weights"
    facts |= {"checkpoint": path.name, "sha256": weights_sha256(given)}
    return Beginning(f"model.weights: {weights}: the {which} of {path.name}: {sentence}", {_FACT: facts})


def begun(checkpoint: str) -> Beginning:
    """Return what a run that goes on from its own `checkpoint` once began with; it tells no one again."""
    held = read_state(Path(checkpoint)).get(_FACT)
    return Beginning(facts={_FACT: held} if isinstance(held, dict) else {})


def _network(own: Recipe, section: Model, path: Path) -> nn.Module:
    """Return the network of the run that `own` is the recipe of, on the CPU.

    Code that it names by import path is imported only where the recipe at hand names the same.
    """
    if is_own_model(own.model.name) and own.model.name != section.name:
        raise RecipeError(
            f"model.weights: {path}: is of {own.model.name}, which is code that the run names "
            f"(set model.name to it; it is {section.name})"
        )
    precision = build_precision(precision_on(own.train.precision, _CPU), _CPU)
    return judged_network(own, read_facts(RunDir(path.parent.parent)), precision, _CPU, path)
