"""Read rank and world size from the environment variables of torchrun, Slurm or the local launcher. Torch-free."""

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from paceline.core.errors import WorldError
from paceline.core.process import die_with_parent
from paceline.core.world import NEVER, BatchJob, Launcher, World

_STORE_FD = "PACELINE_STORE_FD"
_LAUNCHER_PID = "PACELINE_LAUNCHER_PID"
_ATTEMPT = "PACELINE_ATTEMPT"
_AGENT_ID = "TORCHELASTIC_RUN_ID"
_SLURM_PORTS = range(20_000, 30_000)
# Distance between the ports of two steps of a job. A prime above 1000: jobs whose numbers differ by less than 900 do
# not collide in their first nine steps.
_PORT_STRIDE = 1009


def world_from_environ(environ: Mapping[str, str]) -> World:
    """Return the world and this process's rank in it. Raise `WorldError` for contradictory variables."""
    tasks = _tasks_on_this_node(environ)
    cpus = _given_cpus(environ, tasks)
    # Without a number of CPUs from Slurm, its tasks may share all of them.
    gpus = _int_variable(environ, "SLURM_GPUS_ON_NODE", 0)
    return replace(
        _rank_from_environ(environ), allocated_cpus=cpus, allocated_gpus=gpus, local_tasks=tasks if cpus else 1
    )


def current_world() -> World:
    """Return the world from `os.environ`, for programs that paceline did not start."""
    return world_from_environ(os.environ)


def _rank_from_environ(environ: Mapping[str, str]) -> World:
    # torchrun first: it may run inside of srun. A batch script has SLURM_PROCID too, but is not a task of a step.
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _checked_world(_from_torchrun(environ))
    if "SLURM_PROCID" in environ and environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _checked_world(_from_slurm(environ))
    # A step with one task is a single rank, or a shell that may start ranks itself; it is restarted with its job.
    return World(attempt=_int_variable(environ, "SLURM_RESTART_COUNT", 0))


def batch_job(environ: Mapping[str, str]) -> BatchJob:
    """Return the Slurm job of this process. Raise `WorldError` for an end time that is not a number."""
    # Slurm sets SLURM_JOB_END_TIME since 23.02, as it was known when the step began
    # (https://github.com/SchedMD/slurm/blob/master/CHANGELOG/slurm-23.02.md). PACELINE_END_TIME overrides it, for an
    # older Slurm, another batch system or an end that has moved; set to nothing, there is no end.
    name = "PACELINE_END_TIME" if "PACELINE_END_TIME" in environ else "SLURM_JOB_END_TIME"
    text = environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise WorldError(
            f"{name}: {text!r} is not a time (set it to seconds since 1970, as printed by date +%s, or to nothing)"
        )
    return BatchJob(
        number=environ.get("SLURM_JOB_ID", ""),
        restarts=_int_variable(environ, "SLURM_RESTART_COUNT", 0),
        end_s=float(text) if text else NEVER,
    )


def rank_environ(environ: Mapping[str, str], world: World) -> dict[str, str]:
    """Return `environ` with the variables from which `world_from_environ` reads `world`."""
    return {
        **environ,
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_world_size),
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_port),
        _LAUNCHER_PID: str(world.launcher_pid),
        _STORE_FD: str(world.store_fd),
        _ATTEMPT: str(world.attempt),
    }


def end_with_launcher(environ: Mapping[str, str], world: World) -> None:
    """Kill this rank when its launcher dies: the local launcher, torchrun's agent or Slurm's step."""
    # The local launcher ties its ranks before they run Python. Ranks that a shell started by RANK and WORLD_SIZE alone
    # may outlive that shell.
    if ends_with_parent(environ, world):
        die_with_parent(world.launcher_pid or os.getppid())


def ends_with_parent(environ: Mapping[str, str], world: World) -> bool:
    """Return whether the parent process is this rank's launcher."""
    return world.launcher in ("local", "slurm") or (world.launcher == "torchrun" and _AGENT_ID in environ)


def is_one_node(environ: Mapping[str, str], world: World) -> bool:
    """Return whether all ranks are known to be on this node."""
    if _is_loopback(world.master_addr):
        return True
    # RANK and WORLD_SIZE alone do not say how many ranks a node has.
    is_local_size_known = world.launcher != "torchrun" or "LOCAL_WORLD_SIZE" in environ
    return is_local_size_known and world.local_world_size == world.world_size


def launch_name(environ: Mapping[str, str], parent: int, host: str) -> str:
    """Return a name that is the same after torchrun or Slurm restart the ranks of a job; empty without either."""
    # A requeued Slurm job numbers its steps from 0 again. torchrun's agent is process `parent` on `host`.
    if "SLURM_JOB_ID" in environ:
        return f"slurm {environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', 'batch')}"
    return f"torchrun {parent} on {host}" if _AGENT_ID in environ else ""


def count_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs visible to this process, without loading the driver."""
    present = [path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(present)
    named = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return min(len(present), len(named))


def _from_torchrun(environ: Mapping[str, str]) -> World:
    launcher_pid = _int_variable(environ, _LAUNCHER_PID, 0)
    is_local = launcher_pid > 0
    launcher: Launcher = "local" if is_local else "torchrun"
    world_size = _int_variable(environ, "WORLD_SIZE")
    rank = _int_variable(environ, "RANK")
    # The tasks of an srun step whose shell sets RANK and WORLD_SIZE: Slurm's variables give the local rank.
    is_task = world_size > 1 and environ.get("SLURM_STEP_NUM_TASKS") == str(world_size)
    local_ranks = _tasks_on_this_node(environ) if is_task else world_size
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=_int_variable(
            environ, "LOCAL_RANK", _int_variable(environ, "SLURM_LOCALID", rank) if is_task else rank
        ),
        local_world_size=_int_variable(environ, "LOCAL_WORLD_SIZE", local_ranks),
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_int_variable(environ, "MASTER_PORT", 29_500),
        launcher=launcher,
        store_fd=_int_variable(environ, _STORE_FD, -1) if is_local else -1,
        attempt=_int_variable(environ, _ATTEMPT if is_local else "TORCHELASTIC_RESTART_COUNT", 0),
        launcher_pid=launcher_pid,
        agent_hosts_store=not is_local and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_slurm(environ: Mapping[str, str]) -> World:
    world_size = _int_variable(environ, "SLURM_STEP_NUM_TASKS")
    return World(
        rank=_int_variable(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_int_variable(environ, "SLURM_LOCALID", 0),
        local_world_size=_tasks_on_this_node(environ),
        master_addr=environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        master_port=_int_variable(environ, "MASTER_PORT", _slurm_port(environ)),
        launcher="slurm",
        attempt=_int_variable(environ, "SLURM_RESTART_COUNT", 0),
    )


def _slurm_port(environ: Mapping[str, str]) -> int:
    """Return a port that differs between the steps of a job, and between jobs that share a node."""
    steps = _int_variable(environ, "SLURM_JOB_ID", 0) + _PORT_STRIDE * _int_variable(environ, "SLURM_STEP_ID", 0)
    return _SLURM_PORTS[steps % len(_SLURM_PORTS)]


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: `n[01-03,7],login` -> n01."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    host = re.sub(r"\[([0-9]{1,6})(?:[-,][0-9]{1,6})*\]", r"\1", first[0]) if first else ""
    if not host or "[" in host:
        raise WorldError(f"SLURM_STEP_NODELIST: {nodelist!r} names no host (start with srun)")
    return host


def _tasks_on_this_node(environ: Mapping[str, str]) -> int:
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_STEP_NUM_TASKS", "1"))
    return _tasks_on_node(tasks, _int_variable(environ, "SLURM_NODEID", 0))


def _given_cpus(environ: Mapping[str, str], tasks: int) -> int:
    """Return the CPUs of this node that the step, or else the job, was given; 0 if unknown."""
    # SLURM_CPUS_PER_TASK may be the option of `sbatch`, which `srun` does not inherit since Slurm 22.05, so it counts
    # only if SLURM_CPUS_ON_NODE, the CPUs of the step, is missing.
    per_task = _int_variable(environ, "SLURM_CPUS_PER_TASK", 0) if "SLURM_STEP_NUM_TASKS" in environ else 0
    return _int_variable(environ, "SLURM_CPUS_ON_NODE", per_task * tasks)


def _tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Parse Slurm's `2(x3),1`: two tasks on each of three nodes, then one."""
    tasks = 0
    for each in tasks_per_node.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", each)
        if match is None:
            raise WorldError(f"SLURM_STEP_TASKS_PER_NODE: {tasks_per_node!r} cannot be read (start with srun)")
        tasks = int(match[1])
        if node < int(match[2] or 1):
            break
        node -= int(match[2] or 1)
    return tasks


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _int_variable(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise WorldError(f"{name}: {text!r} is not a number (unset it, or start with torchrun or srun)") from None


def _checked_world(world: World) -> World:
    if not 0 < world.master_port < 65_536:
        raise WorldError(
            f"MASTER_PORT: {world.master_port} is not a port (set one of 1024 to 65535, the same on all ranks)"
        )
    if not (0 <= world.rank < world.world_size and 0 <= world.local_rank < world.local_world_size):
        raise WorldError(
            f"RANK: rank {world.rank} of {world.world_size}, local rank {world.local_rank} of "
            f"{world.local_world_size} is not a rank of a world (unset the variables, or start with torchrun or srun)"
        )
    return world


def has_own_gpu(world: World, available: int) -> bool:
    """Return whether the single `available` GPU belongs to this rank alone, as with `srun --gpus-per-task=1`."""
    # So it is if Slurm started each of the node's ranks as a task and gave them at least as many GPUs.
    return available == 1 and world.local_world_size <= min(world.allocated_gpus, world.local_tasks)
