"""Join or start ranks: checks of `--ranks`, restarts, and steps in a Slurm allocation."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from paceline.cli.args import count_ranks
from paceline.core.errors import WorldError
from paceline.core.host import oom_kills, usable_cores
from paceline.core.process import ignore_stop_signals
from paceline.core.units import count
from paceline.core.world import World
from paceline.lab.process import ProcessStarter, start_process
from paceline.parallel.environ import count_gpus, end_with_launcher, is_one_node, world_from_environ
from paceline.parallel.launch import PREEMPTED, LaunchResult, RankStreams, inherit_streams, launch
from paceline.parallel.network_interface import interface_to
from paceline.recipe.schema.train import Parallel

_LOOPBACK = "lo"
COMMAND_VARIABLE: Final = "PACELINE_COMMAND"  # a JSON list: the command line that started the ranks, as typed
_KILLED_CODE = 128 + signal.SIGKILL
_OOM_MESSAGE = (
    "out of memory, by the limit of its control group or of the machine (set train.accumulate=auto, lower data.workers,"
    " or request more memory)"
)
RANKS_PER_CORE: Final = 4
MIN_RANK_LIMIT: Final = 16
"""Ranks that any machine may start; beyond them, `RANKS_PER_CORE` per core. Each rank is a process that imports torch:
200 MB of memory and seconds of CPU time.
"""
_TASK_VARIABLE: Final = re.compile(
    r"SLURM_(STEP_\w+|STEPID|PROCID|LOCALID|NODEID|TASK_PID|NTASKS\w*|NPROCS|TASKS_PER_NODE|DISTRIBUTION|CPU_BIND\w*)"
)
"""Variables that describe the calling process, or the tasks of its job; a step of ours gets its own.

Names: https://slurm.schedmd.com/srun.html, sections "Input" and "Output environment variables".
"""


def enter_world() -> World:
    """Return this process's world, and tie the rank's life to its launcher (torchrun's agent, Slurm's step).

    Set GLOO_SOCKET_IFNAME, if unset.
    """
    world = world_from_environ(os.environ)
    # A lost peer makes torch's C++ side print 20 lines; paceline prints one.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # above all levels: the profiler logs its start and stop
    end_with_launcher(os.environ, world)
    # On one node loopback, else an interface that other nodes can reach.
    if interface := _gloo_interface(world):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return world


def ranks_to_start(text: str, world: World, section: Parallel, *, oversubscribe: bool = False) -> int:
    """Return the number of ranks, from `--ranks` or from the launcher.

    Raise `WorldError` if the two disagree, and for more ranks than `refuse_too_many` allows.
    """
    if world.launcher != "single":
        if oversubscribe and world.launcher != "local":
            raise WorldError(f"--oversubscribe: has no effect on ranks that {world.launcher} started (leave it out)")
        if text not in ("auto", str(world.world_size)):
            started = f"{count(world.world_size, 'rank')} were started by {world.launcher}"
            raise WorldError(f"--ranks: {text}, but {started} (leave --ranks out)")
        return world.world_size
    is_one_process = section.strategy == "dataparallel"  # one process drives all GPUs
    ranks = 1 if text == "auto" and is_one_process else count_ranks(text, os.environ)
    refuse_too_many(ranks, section.device, oversubscribe=oversubscribe)
    return ranks


def refuse_too_many(ranks: int, device: str, *, oversubscribe: bool) -> None:
    """Raise `WorldError` for more ranks than this machine should start: one per GPU, or a few per CPU core.

    `oversubscribe` lifts the limit per core only.
    """
    gpus = 0 if device == "cpu" else count_gpus(os.environ)
    if 0 < gpus < ranks:
        available = count(gpus, "GPU")
        raise WorldError(
            f"--ranks: {ranks} is more than the {available} of this machine (start {gpus}, or set parallel.device=cpu)"
        )
    # Each rank is a process that imports torch: too many make the machine unusable.
    cores = usable_cores()
    most = max(MIN_RANK_LIMIT, RANKS_PER_CORE * cores)
    if not gpus and ranks > most and not oversubscribe:
        raise WorldError(
            f"--ranks: {ranks} on {count(cores, 'CPU core')} (start at most {most}, or add --oversubscribe)"
        )


def start_ranks(ranks: int, port: int, extra: list[str], *, grace_s: float = 60.0, max_restarts: int = 0) -> int:
    """Run this command as `ranks` processes, with `extra` arguments after the verb; return the exit code.

    If a rank is lost, restart all and resume, up to `max_restarts` times; not after an error, a stop signal or
    preemption.
    """
    verb, *args = sys.argv[1:]
    environ = {**os.environ, COMMAND_VARIABLE: json.dumps(["paceline", verb, *args])}
    for attempt in range(max_restarts + 1):
        resume = ["--resume"] if attempt and "--resume" not in args else []
        ended = launch_verb([verb, *extra, *resume, *args], ranks, environ, port=port, grace_s=grace_s, attempt=attempt)
        if not ended.was_lost or attempt == max_restarts:
            break
        cause = ended.sentence or "a rank failed, so all ranks were stopped"
        print(f"warning: {cause}; restarting all ranks (restart {attempt + 1} of {max_restarts})", file=sys.stderr)
    if ended.code == PREEMPTED:
        ignore_stop_signals()
    if ended.sentence:
        print(f"error: {ended.sentence}", file=sys.stderr)
    return ended.code


def launch_verb(
    args: Sequence[str],
    ranks: int,
    environ: Mapping[str, str],
    *,
    port: int = 0,
    grace_s: float = 60.0,
    attempt: int = 0,
    streams: RankStreams = inherit_streams,
) -> LaunchResult:
    """Run `paceline` with `args` as `ranks` processes, as `launch` does; say so if one was killed for its memory."""
    # -P: do not import modules from the current folder, which may hold data.
    command = [sys.executable, "-P", "-m", "paceline", *args]
    oom_before = oom_kills()
    ended = launch(command, ranks, environ, port=port, grace_s=grace_s, attempt=attempt, streams=streams)
    if ended.code == _KILLED_CODE and ended.was_lost and oom_kills() > oom_before:
        return replace(ended, sentence=f"{ended.sentence}: {_OOM_MESSAGE}")
    return ended


def typed_command(world: World) -> tuple[str, ...]:
    """Return the command line as the user typed it, also on a rank that `start_ranks` started."""
    typed = None
    if world.launcher == "local":
        with contextlib.suppress(ValueError):
            typed = json.loads(os.environ.get(COMMAND_VARIABLE, ""))
    return tuple(map(str, typed)) if isinstance(typed, list) else ("paceline", *sys.argv[1:])


def _gloo_interface(world: World) -> str:
    """Return the network interface for gloo; "" to let it choose."""
    if world.world_size == 1:
        return ""
    if is_one_node(os.environ, world):
        return _LOOPBACK if _has_interface(_LOOPBACK) else ""
    return interface_to(world.master_addr)


def _has_interface(name: str) -> bool:
    return name in (known for _, known in socket.if_nameindex())


def refuse_more_nodes(nodes: Sequence[int], environ: Mapping[str, str]) -> None:
    """Raise `WorldError` for nodes outside of an allocation, and for more than it has."""
    if not nodes:
        return
    if "SLURM_JOB_ID" not in environ:
        raise WorldError(f"--nodes: {_join_numbers(nodes)}, but this is not a Slurm allocation (use salloc or sbatch)")
    allocated = allocated_nodes(environ)
    if max(nodes) > allocated:
        raise WorldError(
            f"--nodes: {max(nodes)} is more than the {count(allocated, 'node')} of the allocation (request more)"
        )


def allocated_nodes(environ: Mapping[str, str]) -> int:
    """Return the number of nodes in the current allocation, 0 outside of one."""
    if "SLURM_JOB_ID" not in environ:
        return 0
    text = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    return int(text) if text.isdecimal() else 1


def gpus_per_node(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs per node of the allocation, 0 if Slurm does not report it."""
    text = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(text) if text.isdecimal() else 0


def srun_starter(environ: Mapping[str, str]) -> ProcessStarter:
    """Return a function that starts `srun` without the variables of the calling task."""
    dropped = [word for name in sorted(environ) if _TASK_VARIABLE.fullmatch(name) for word in ("-u", name)]
    given = ["SLURM_OVERLAP=1"]  # share resources that another step holds, such as the one of this process
    # Since Slurm 22.05, srun does not inherit the CPUs per task of the job.
    if "SLURM_CPUS_PER_TASK" in environ and "SRUN_CPUS_PER_TASK" not in environ:
        given.append(f"SRUN_CPUS_PER_TASK={environ['SLURM_CPUS_PER_TASK']}")
    # On SIGTERM srun ends its step on every node, which it could not on SIGKILL.
    return lambda command: start_process(["env", *dropped, *given, *command], signal.SIGTERM)


def _join_numbers(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
