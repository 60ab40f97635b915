"""Being a rank, and starting ranks: what `train` and `eval` share."""

import os
import sys

from paceline.cli.words import count_ranks
from paceline.core.errors import WorldError
from paceline.core.process import die_with_parent
from paceline.core.units import count
from paceline.core.world import World
from paceline.parallel.environ import count_gpus, world_from_environ
from paceline.parallel.launch import launch
from paceline.recipe.schema import Recipe


def enter_world() -> World:
    """Return this process's place; a rank of ours ends with its launcher."""
    world = world_from_environ(os.environ)
    # A rank that asks a peer for something may find it gone; torch's C++ side would print 20 lines about it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if world.launcher == "local":
        die_with_parent(world.launcher_pid)
    return world


def ranks_to_start(text: str, world: World, recipe: Recipe) -> int:
    """Return how many ranks the run has, from `--ranks` or from who started this process.

    Raise `WorldError` when the two disagree, or when the machine has GPUs, but fewer than ranks.
    """
    if world.launcher != "single":
        if text not in ("auto", str(world.world_size)):
            started = f"{count(world.world_size, 'rank')} were started by {world.launcher}"
            raise WorldError(f"--ranks: {text}, but {started} (leave --ranks out)")
        return world.world_size
    is_one_process = recipe.parallel.strategy == "dataparallel"  # it drives all GPUs itself
    ranks = 1 if text == "auto" and is_one_process else count_ranks(text, os.environ)
    gpus = count_gpus(os.environ)
    if recipe.parallel.device != "cpu" and 0 < gpus < ranks:
        here = count(gpus, "GPU")
        raise WorldError(f"--ranks: {ranks} is more than the {here} here (start {gpus}, or set parallel.device=cpu)")
    return ranks


def start_ranks(ranks: int, port: int, extra: list[str]) -> int:
    """Run this very command as `ranks` processes, with `extra` words after the verb; return the exit code."""
    verb, *words = sys.argv[1:]
    # -P: a module in the current folder, which may be somebody's data, is not to be imported.
    command = [sys.executable, "-P", "-m", "paceline", verb, *extra, *words]
    code, sentence = launch(command, ranks, os.environ, port=port)
    if sentence:
        print(f"error: {sentence}", file=sys.stderr)
    return code
