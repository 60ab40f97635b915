"""A run that a script or a notebook asks for: what `paceline.train` does. It starts no ranks; torchrun and srun do."""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.cli.ranks import enter_world
from paceline.cli.train import Asked, choose_rundir, resumed, run_here
from paceline.core.errors import RecipeError
from paceline.core.results import RunResult
from paceline.recipe.load import Loaded, load_any
from paceline.recipe.own import path_of
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe

Part = str | Callable[..., Any] | None


def train(
    recipe: str | Path | Recipe | Mapping[str, Any],
    overrides: tuple[str, ...],
    model: Part,
    source: Part,
    run_dir: str | Path | None,
    *,
    resume: bool,
) -> RunResult:
    """Train as this rank of the world that the environment tells of; return the result, the same on every rank."""
    from paceline.train.interrupt import Interrupts

    started_s = time.perf_counter()
    folder = None if run_dir is None else Path(run_dir)
    name, loaded = _loaded(recipe, _patch(overrides, model, source), folder, resume=resume)
    world = enter_world()
    rundir = choose_rundir(name, loaded, folder, world, resume=resume)
    try:
        with Interrupts() as interrupts:
            asked = Asked(started_s, ("python", *sys.argv), sys.stdout, resume)
            return run_here(loaded, world, rundir, interrupts, asked)
    finally:
        if folder is None:
            rundir.give_back()


def _patch(overrides: tuple[str, ...], model: Part, source: Part) -> Patch:
    """Return what is laid over the recipe: first the parts that were handed over, then the words."""
    parts = (("model.name", "model", model), ("data.source.name", "source", source))
    chosen = tuple((path, path_of(part, field)) for path, field, part in parts if part is not None)
    return Patch((*chosen, *Patch.parse(list(overrides)).assignments))


def _loaded(
    recipe: str | Path | Recipe | Mapping[str, Any], patch: Patch, run_dir: Path | None, *, resume: bool
) -> tuple[str, Loaded]:
    """Return the recipe and the name it was found by."""
    if isinstance(recipe, str | Path):
        name = resumed(str(recipe), run_dir) if resume else str(recipe)
        return name, load_any(name, patch)
    loaded = load_any(recipe, patch)
    if resume and run_dir is None:
        raise RecipeError("resume: which run is meant is not said (name its run_dir)")
    return "script", loaded
