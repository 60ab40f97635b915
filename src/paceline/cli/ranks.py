"""Being a rank, and starting ranks: what `train` and `eval` share."""

import os
import socket
import sys

from paceline.cli.words import count_ranks
from paceline.core.errors import WorldError
from paceline.core.process import die_with_parent, ignore_stop_signals
from paceline.core.units import count
from paceline.core.world import World
from paceline.parallel.environ import count_gpus, ends_with_parent, is_one_node, world_from_environ
from paceline.parallel.interface import interface_to
from paceline.parallel.launch import PREEMPTED, launch
from paceline.recipe.schema import Recipe

_LOOPBACK = "lo"


def enter_world() -> World:
    """Return this process's place; a rank ends with the launcher, torchrun's agent or Slurm's step that started it.

    Ranks that share a node talk on its loopback interface alone, and those of several on one that others can reach,
    unless GLOO_SOCKET_IFNAME says otherwise.
    """
    world = world_from_environ(os.environ)
    # A rank that asks a peer for something may find it gone; torch's C++ side would print 20 lines about it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # above all levels; its profiler writes when it starts and stops
    if ends_with_parent(os.environ, world):
        die_with_parent(world.launcher_pid or os.getppid())
    if interface := _interface(world):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
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


def start_ranks(ranks: int, port: int, extra: list[str], *, grace_s: float = 60.0, max_restarts: int = 0) -> int:
    """Run this very command as `ranks` processes, with `extra` words after the verb; return the exit code.

    When a rank was lost all are started again, up to `max_restarts` times, to resume what `extra` names as the run.
    A refusal, a signal to stop and a run that has saved itself are no loss.
    """
    verb, *words = sys.argv[1:]
    for attempt in range(max_restarts + 1):
        again = ["--resume"] if attempt and "--resume" not in words else []
        # -P: a module in the current folder, which may be somebody's data, is not to be imported.
        command = [sys.executable, "-P", "-m", "paceline", verb, *extra, *again, *words]
        ended = launch(command, ranks, os.environ, port=port, grace_s=grace_s, attempt=attempt)
        if not ended.was_lost or attempt == max_restarts:
            break
        what = ended.sentence or "a rank failed, so all ranks were ended"
        print(f"warning: {what}; starting them again (restart {attempt + 1} of {max_restarts})", file=sys.stderr)
    if ended.code == PREEMPTED:
        ignore_stop_signals()
    if ended.sentence:
        print(f"error: {ended.sentence}", file=sys.stderr)
    return ended.code


def _interface(world: World) -> str:
    """Return the network interface that gloo is to use, or nothing where it may choose."""
    if world.world_size == 1:
        return ""
    if is_one_node(os.environ, world):
        return _LOOPBACK if _has_interface(_LOOPBACK) else ""
    return interface_to(world.master_addr)


def _has_interface(name: str) -> bool:
    return name in (known for _, known in socket.if_nameindex())
