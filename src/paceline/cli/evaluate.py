"""`paceline eval`: the exact accuracy of a run's weights."""

import os
from pathlib import Path

from paceline.cli.train import check_devices, enter_world, start_ranks
from paceline.cli.words import count_ranks
from paceline.core.errors import CheckpointError, RecipeError
from paceline.core.rundir import RunDir
from paceline.recipe.load import RUN_RECIPE, load
from paceline.recipe.patch import Patch


def evaluate(run: Path, overrides: list[str], ranks: str, checkpoint: str, *, port: int, as_json: bool) -> int:
    """Do what `paceline eval` was asked for; return the exit code."""
    run = run.expanduser()
    if not (run / RUN_RECIPE).is_file():
        raise RecipeError(f"{run}: is not a run directory (it has no {RUN_RECIPE}; see runs/)")
    loaded = load(str(run), Patch.parse(overrides))
    world = enter_world()
    if world.launcher == "single":
        num_ranks = count_ranks(ranks, os.environ)
        if num_ranks > 1:
            check_devices(loaded, num_ranks)
            return start_ranks(num_ranks, port, [])
    from paceline.cli.show import show_evaluation
    from paceline.train.run import evaluate as work

    path = _chosen(RunDir(run), checkpoint)
    result = work(loaded.recipe, world, path)
    if world.is_main:
        show_evaluation(result, path, as_json=as_json)
    return 0


def _chosen(rundir: RunDir, name: str) -> Path:
    from paceline.train.checkpoint import Checkpoints, read_state

    checkpoints = Checkpoints(rundir.checkpoints, keep=1)
    newest = checkpoints.newest()
    if newest is None:
        raise CheckpointError(f"{rundir.checkpoints}: holds no checkpoint (train with checkpoint.every set)")
    if name == "last":
        return newest
    if name == "best":
        return checkpoints.at(read_state(newest)["train"]["best_step"])
    if not name.isdecimal():
        raise RecipeError(f"--checkpoint: {name!r} is not a checkpoint (write last, best or a step's number)")
    return checkpoints.at(int(name))
