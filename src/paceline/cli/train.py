"""`paceline train`: read the words, start ranks if nobody else did, and run this one."""

import os
import sys
from datetime import datetime
from pathlib import Path

from paceline.cli.started import STARTED_S
from paceline.cli.words import count_ranks, split_words
from paceline.core.errors import RecipeError, WorldError
from paceline.core.process import die_with_parent
from paceline.core.rundir import RunDir
from paceline.core.world import World
from paceline.parallel.environ import count_gpus, world_from_environ
from paceline.parallel.launch import launch
from paceline.recipe.load import RUN_RECIPE, Loaded, load
from paceline.recipe.plan import divide_batch


def train(
    words: list[str], ranks: str, run_dir: Path | None, *, resume: bool, dry_run: bool, port: int, as_json: bool
) -> int:
    """Do what `paceline train` was asked for; return the exit code."""
    name, patch = split_words(words)
    loaded = load(name, patch)
    world = enter_world()
    num_ranks = count_ranks(ranks, os.environ) if world.launcher == "single" else world.world_size
    divide_batch(loaded.recipe, num_ranks)
    if dry_run:
        from paceline.cli.dry_run import dry_run as show

        return show(loaded, world, num_ranks, as_json=as_json)
    rundir = _rundir(name, loaded, run_dir, resume=resume)
    if world.launcher == "single" and num_ranks > 1:
        check_devices(loaded, num_ranks)
        return start_ranks(num_ranks, port, ["--run-dir", str(rundir.path)])
    return _train_here(loaded, world, rundir, resume=resume, as_json=as_json)


def enter_world() -> World:
    """Return this process's place; a rank of ours ends with its launcher."""
    world = world_from_environ(os.environ)
    # A rank that asks a peer for something may find it gone; torch's C++ side would print 20 lines about it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if world.launcher == "local":
        die_with_parent(world.launcher_pid)
    return world


def check_devices(loaded: Loaded, ranks: int) -> None:
    """Raise `WorldError` when this machine has GPUs, but fewer than ranks; torch need not be asked for that."""
    gpus = count_gpus(os.environ)
    if loaded.recipe.parallel.device != "cpu" and 0 < gpus < ranks:
        raise WorldError(
            f"--ranks: {ranks} is more than the {gpus} GPUs here (start {gpus}, or set parallel.device=cpu)"
        )


def start_ranks(ranks: int, port: int, extra: list[str]) -> int:
    """Run this very command as `ranks` processes, with `extra` words; return the exit code."""
    command = [sys.executable, "-m", "paceline", *sys.argv[1:], *extra]
    code, sentence = launch(command, ranks, os.environ, port=port)
    if sentence:
        print(f"error: {sentence}", file=sys.stderr)
    return code


def _rundir(name: str, loaded: Loaded, run_dir: Path | None, *, resume: bool) -> RunDir:
    """Return where to write: as told, or the run that is resumed, or a new folder under `runs/`."""
    if run_dir is not None:
        rundir = RunDir(run_dir.expanduser())
    elif resume and (Path(name).expanduser() / RUN_RECIPE).is_file():
        rundir = RunDir(Path(name).expanduser())
    elif resume:
        raise RecipeError("--resume: names no run (write paceline train RUN --resume, or add --run-dir RUN)")
    else:
        rundir = RunDir.default(loaded.name, datetime.now().astimezone())
    if world_from_environ(os.environ).is_main:
        rundir.refuse_another_run(resume=resume)
    return rundir


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
