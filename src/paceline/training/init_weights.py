"""Load the initial weights of a run: published ones, those of a file, or of a checkpoint of another run."""

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
from paceline.core.run_dir import RunDir, is_run
from paceline.data.files import expand_path, is_folder
from paceline.models.pretrained import copy_weights, find_weights_file, load_weights
from paceline.models.published import expected_sha256, fetch_weights, find_published_weights, hub_commit
from paceline.recipe.load import load
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.base import is_plugin_name
from paceline.recipe.schema.model import Model, is_published
from paceline.training.checkpoint import CheckpointStorage, KeepPolicy, model_tensors, read_state, weights_sha256
from paceline.training.eval_model import eval_precision, has_weight_average, load_eval_model
from paceline.training.precision import build_precision
from paceline.training.trained_dataset import read_trained_dataset

_CHECKPOINT_NAMES: Final = ("last", "best")
_CPU: Final = torch.device("cpu")
_STARTED_FROM: Final = "started_from"


@dataclass(frozen=True)
class InitialWeights:
    """A note for the user, and the provenance: `path`, `checkpoint` of a run, `sha256` of the file or weights.

    For published weights also their full `name`, the `file` in the cache, and the `commit` of a repository.
    """

    note: str | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)


def find_initial_checkpoint(weights: str, field: str = "model.weights") -> str:
    """Return the checkpoint that `weights`, the value of `field`, names, "" if it is no folder.

    It may be a run directory, for its last checkpoint, or RUN/checkpoints/ with best, last or a step's folder. Raise
    `RecipeError` for any other folder, or a missing checkpoint.
    """
    if weights == "off" or is_published(weights):
        return ""
    path = expand_path(weights)
    above = path.parent.parent
    run, name = (above, path.name) if path.parent == RunDir(above).checkpoints else (path, "last")
    if not is_run(run):
        if not is_folder(path):
            return ""
        raise RecipeError(
            f"{field}: {weights}: is neither a run directory nor a checkpoint of one "
            "(give RUN, RUN/checkpoints/best or a step's folder there, a .safetensors or a .pth)"
        )
    if name not in _CHECKPOINT_NAMES:
        if not os.path.lexists(path):
            raise RecipeError(f"{field}: {weights}: no such checkpoint (see {path.parent})")
        return str(path) if is_folder(path) else ""
    try:
        return str(CheckpointStorage(RunDir(run).checkpoints, KeepPolicy(1)).by_name(name))
    except CheckpointError as error:
        raise RecipeError(f"{field}: {error}") from None


def load_initial_weights(
    section: Model, model: nn.Module, checkpoint: str, *, may_download: bool = True
) -> InitialWeights:
    """Load the weights of `section.weights`, or of `checkpoint` if given, into `model` in place.

    Published weights come from the cache of their library, into which they are downloaded if they `may_download`.
    Raise `RecipeError` as `load_weights` does, and for another SHA-256 than `section.weights_sha256`, and
    `CheckpointError` for a damaged checkpoint.
    """
    weights = section.weights
    if weights == "off":
        return InitialWeights()
    if is_published(weights):
        return _load_published(section, model, may_download=may_download)
    origin = {"path": weights}
    if not checkpoint:
        origin["sha256"] = _file_sha256(find_weights_file(weights), weights)
        _check_sha256(weights, origin["sha256"], section.weights_sha256, "model.weights_sha256")
        sentence = load_weights(model, weights, section.name)  # after the check: only the expected file is parsed
        return InitialWeights(f"model.weights: {weights}: {sentence}", {_STARTED_FROM: origin})
    path = Path(checkpoint)
    run_recipe = load(str(path.parent.parent)).recipe
    tensors = model_tensors(_load_source_model(run_recipe, section, path))
    sentence = copy_weights(model, tensors, weights, section.name, run_recipe.model.name)
    which = "averaged weights" if has_weight_average(run_recipe.train, run_recipe.optim) else "weights"
    origin |= {"checkpoint": path.name, "sha256": weights_sha256(tensors)}
    _check_sha256(weights, origin["sha256"], section.weights_sha256, "model.weights_sha256")
    return InitialWeights(f"model.weights: {weights}: the {which} of {path.name}: {sentence}", {_STARTED_FROM: origin})


def _load_published(section: Model, model: nn.Module, *, may_download: bool) -> InitialWeights:
    weights = section.weights
    published = find_published_weights(section)
    file = fetch_weights(published, weights, may_download=may_download)
    digest = _file_sha256(file, weights)
    _check_sha256(weights, digest, expected_sha256(file) or "off", f"{file}, by its name in the cache; remove it")
    _check_sha256(weights, digest, section.weights_sha256, "model.weights_sha256")
    sentence = load_weights(model, str(file), section.name, weights)
    origin = {"path": weights, "name": published.name, "file": str(file), "sha256": digest}
    commit = hub_commit(published, file)
    if commit:
        origin["commit"] = commit
    name = "" if published.name == weights else f"{published.name}: "
    return InitialWeights(f"model.weights: {weights}: {name}{sentence}", {_STARTED_FROM: origin})


def _file_sha256(path: Path, weights: str) -> str:
    try:
        with open_to_read(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RecipeError(
            f"model.weights: {weights}: cannot be read: {error.strerror} (check the permissions of {path})"
        ) from None


def _check_sha256(weights: str, digest: str, expected: str, whose: str) -> None:
    """Raise `RecipeError` if `digest` does not start with `expected`, which is that of `whose`."""
    if expected != "off" and not digest.startswith(expected):
        raise RecipeError(f"model.weights: {weights}: its SHA-256 is {digest}, not {expected} ({whose})")


def restored_origin(checkpoint: str) -> InitialWeights:
    """Return the provenance that the run's own `checkpoint` recorded."""
    origin = read_state(Path(checkpoint)).get(_STARTED_FROM)
    return InitialWeights(provenance={_STARTED_FROM: origin} if isinstance(origin, dict) else {})


def _load_source_model(run_recipe: Recipe, section: Model, path: Path) -> nn.Module:
    """Return the model of checkpoint `path`, with the weights that its run evaluated, on the CPU."""
    # A plugin is imported only if the new recipe names it too: that is the code which the user consented to.
    if is_plugin_name(run_recipe.model.name) and run_recipe.model.name != section.name:
        raise RecipeError(
            f"model.weights: {path}: is of {run_recipe.model.name}, which is code that the run names "
            f"(set model.name to it; it is {section.name})"
        )
    precision = build_precision(eval_precision(run_recipe.train.precision, _CPU), _CPU)
    return load_eval_model(run_recipe, read_trained_dataset(RunDir(path.parent.parent)), precision, _CPU, path)
