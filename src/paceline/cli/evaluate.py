"""`paceline eval`: the exact accuracy of a run's weights, as they are and averaged."""

from pathlib import Path

from paceline.cli.ranks import enter_world, ranks_to_start, start_ranks
from paceline.core.errors import RecipeError
from paceline.core.rundir import RunDir
from paceline.recipe.load import RUN_RECIPE, load
from paceline.recipe.patch import Patch


def evaluate(
    run: Path, overrides: list[str], ranks: str, checkpoint: str, *, port: int, as_json: bool, per_class: bool
) -> int:
    """Do what `paceline eval` was asked for; return the exit code."""
    run = run.expanduser()
    if not (run / RUN_RECIPE).is_file():
        raise RecipeError(f"{run}: is not a run directory (it has no {RUN_RECIPE}; see runs/)")
    loaded = load(str(run), Patch.parse(overrides))
    world = enter_world()
    num_ranks = ranks_to_start(ranks, world, loaded.recipe)
    if world.launcher == "single" and num_ranks > 1:
        return start_ranks(num_ranks, port, [])
    from paceline.cli.show import show_evaluation
    from paceline.train.run import evaluate as work

    path = _chosen(RunDir(run), checkpoint)
    report = work(loaded.recipe, world, path)
    if world.is_main:
        show_evaluation(report, path, as_json=as_json, per_class=per_class)
    return 0


def _chosen(rundir: RunDir, name: str) -> Path:
    from paceline.train.checkpoint import Checkpoints, Keep

    checkpoints = Checkpoints(rundir.checkpoints, Keep(1))
    if name == "last":
        return checkpoints.last()
    if name == "best":
        return checkpoints.best()
    if not name.isdecimal():
        raise RecipeError(f"--checkpoint: {name!r} is not a checkpoint (write last, best or a step's number)")
    return checkpoints.at(int(name))
