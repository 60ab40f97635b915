"""`paceline train`: read the words, start ranks if nobody else did, and run this one."""

import json
import sys
from datetime import datetime
from pathlib import Path

from paceline.cli.ranks import enter_world, ranks_to_start, start_ranks
from paceline.cli.started import STARTED_S
from paceline.cli.words import split_words
from paceline.core.errors import RecipeError
from paceline.core.rundir import RunDir
from paceline.core.world import World
from paceline.recipe.load import DEFAULT, RUN_RECIPE, Loaded, load
from paceline.recipe.plan import divide_batch


def train(
    words: list[str], ranks: str, run_dir: Path | None, *, resume: bool, dry_run: bool, port: int, as_json: bool
) -> int:
    """Do what `paceline train` was asked for; return the exit code."""
    name, patch = split_words(words)
    if resume and name == DEFAULT and run_dir is not None and (run_dir.expanduser() / RUN_RECIPE).is_file():
        name = str(run_dir)  # to resume a run is to go on with its recipe
    loaded = load(name, patch)
    world = enter_world()
    if resume and ranks == "auto" and world.launcher == "single":
        ranks = _ranks_before((run_dir or Path(name)).expanduser())
    num_ranks = ranks_to_start(ranks, world, loaded.recipe)
    divide_batch(loaded.recipe, num_ranks)
    if dry_run:
        from paceline.cli.dry_run import dry_run as show

        return show(loaded, world, num_ranks, as_json=as_json)
    rundir = _rundir(name, loaded, run_dir, world, resume=resume)
    try:
        if world.launcher == "single" and num_ranks > 1:
            return start_ranks(num_ranks, port, ["--run-dir", str(rundir.path)])
        return _train_here(loaded, world, rundir, resume=resume, as_json=as_json)
    finally:
        if run_dir is None:
            rundir.give_back()


def _ranks_before(run: Path) -> str:
    """Return how many ranks the run to resume had, which it goes on with unless told otherwise."""
    try:
        return str(json.loads((run / "plan.json").read_text(encoding="utf-8"))["world_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return "auto"


def _rundir(name: str, loaded: Loaded, run_dir: Path | None, world: World, *, resume: bool) -> RunDir:
    """Return where to write: as told, or the run that is resumed, or a new folder under `runs/`."""
    if run_dir is not None:
        return RunDir(run_dir.expanduser())
    if resume and (Path(name).expanduser() / RUN_RECIPE).is_file():
        return RunDir(Path(name).expanduser())
    if resume:
        raise RecipeError("--resume: names no run (write paceline train RUN --resume, or add --run-dir RUN)")
    if world.is_main:
        return RunDir.claim(loaded.name, datetime.now().astimezone())
    return RunDir(Path("runs"))  # until rank 0 says which


def _train_here(loaded: Loaded, world: World, rundir: RunDir, *, resume: bool, as_json: bool) -> int:
    from paceline.cli.progress import build_progress
    from paceline.cli.show import show_result
    from paceline.train.run import Invocation, run

    out = sys.stderr if as_json else sys.stdout
    invocation = Invocation(STARTED_S, ("paceline", *sys.argv[1:]), [build_progress(out)] if world.is_main else [])
    result = run(loaded.recipe, world, rundir, resume=resume, invocation=invocation)
    if world.is_main:
        show_result(result, rundir, as_json=as_json)
    return 0
