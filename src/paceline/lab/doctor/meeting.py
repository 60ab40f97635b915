"""Where and how the ranks of a run would find one another: the launcher's variables, rank 0's address and its port."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Final

from paceline.core.errors import WorldError
from paceline.core.units import seconds
from paceline.core.world import NEVER
from paceline.lab.doctor.finding import Finding
from paceline.lab.doctor.here import Here, reason
from paceline.lab.doctor.network import addresses_of, is_local
from paceline.parallel.environ import batch_job, world_from_environ

_NAMES: Final = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_RESTART_COUNT",
)  # fmt: skip
_OF_MPI: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_LITTLE_TIME_S: Final = 300.0
_LISTENING: Final = "0A"
"""TCP_LISTEN of the kernel's net/tcp_states.h."""


def meeting_findings(here: Here) -> Iterator[Finding]:
    """Yield how ranks are started, where they would meet, and how long they may run."""
    yield _launcher(here)
    yield from _address(here)
    yield from _port(here)
    yield from _time_left(here)


def _launcher(here: Here) -> Finding:
    found = ", ".join(f"{name}={here.environ[name]}" for name in _NAMES if name in here.environ)
    try:
        world = world_from_environ(here.environ)
    except WorldError as error:
        return Finding.refused("launcher", error)
    hidden = _hidden_tasks(here)
    if hidden:
        return Finding.wrong("launcher", f"{found}: {hidden}", "unset RANK and WORLD_SIZE before srun")
    if world.launcher != "single":
        return Finding.ok("launcher", f"{world.launcher}: rank {world.rank} of {world.world_size} ({found})")
    mpi = next((name for name in _OF_MPI if here.number(name, 1) > 1), "")
    if mpi and "SLURM_JOB_ID" not in here.environ:
        what = f"{mpi}={here.environ[mpi]}: each of the processes would train alone"
        return Finding.wrong("launcher", what, "start with torchrun or srun rather than mpirun")
    if "SLURM_JOB_ID" in here.environ and "SLURM_STEP_ID" not in here.environ:
        return Finding.look("launcher", found, "start with srun: a batch script itself is warned too late to save")
    return Finding.ok("launcher", found or "none: --ranks says how many processes")


def _hidden_tasks(here: Here) -> str:
    """Return how torchrun's variables, of nobody's torchrun, hide that Slurm has started several tasks."""
    tasks = here.number("SLURM_STEP_NUM_TASKS", 1)
    if tasks < 2 or "TORCHELASTIC_RUN_ID" in here.environ or "PACELINE_LAUNCHER_PID" in here.environ:
        return ""
    named = (here.environ.get("RANK"), here.environ.get("WORLD_SIZE"))
    if None in named or named == (here.environ.get("SLURM_PROCID"), str(tasks)):
        return ""
    return f"the variables of torchrun contradict Slurm's, which has started {tasks} tasks"


def _address(here: Here) -> Iterator[Finding]:
    """Yield whether the machine of rank 0 is known by the name that the ranks have for it."""
    host = here.environ.get("MASTER_ADDR", "") if here.world.launcher == "single" else here.world.master_addr
    if not host or here.world.launcher == "local":
        return
    try:
        addresses = addresses_of(host)
    except OSError as error:
        advice = "set MASTER_ADDR to the name or address of rank 0's machine, as scontrol show node tells it"
        yield Finding.wrong("meeting point", f"{host!r} has no address ({reason(error)})", advice)
        return
    yield Finding.ok("meeting point", f"{host} is {addresses[0]}" if host != addresses[0] else host)


def _port(here: Here) -> Iterator[Finding]:
    """Yield whether the port that rank 0 would listen on is free, on the machine of rank 0."""
    number = _port_to_open(here)
    if not number:
        return
    try:
        _listen_once(number)
    except OSError as error:
        holder = holder_of(here, number)
        what = f"{number} is taken by {holder}" if holder else f"{number} cannot be used: {reason(error)}"
        yield Finding.wrong("port", what, "end that program, or set MASTER_PORT to a free port, the same on all ranks")
        return
    yield Finding.ok("port", f"{number} is free")


def _port_to_open(here: Here) -> int:
    """Return the port that this process, as rank 0, would have to open itself; 0 where it would not."""
    world = here.world
    if world.launcher != "single":
        is_ours = world.is_main and world.store_fd < 0 and not world.agent_hosts_store
        return world.master_port if is_ours else 0
    number, host = here.number("MASTER_PORT", 0), here.environ.get("MASTER_ADDR", "")
    if not 0 < number < 65_536:
        return 0
    with contextlib.suppress(OSError):
        return number if not host or any(map(is_local, addresses_of(host))) else 0
    return 0


def _listen_once(number: int) -> None:
    """Listen on all addresses, as the store of the ranks does."""
    if socket.has_dualstack_ipv6():
        socket.create_server(("", number), family=socket.AF_INET6, dualstack_ipv6=True).close()
    else:
        socket.create_server(("", number)).close()


def holder_of(here: Here, number: int) -> str:
    """Return the program that listens on a port, `python (process 12)`; "" where that cannot be seen.

    proc(5): the sockets of /proc/net/tcp are files of /proc/PID/fd, which only the owner of a process may list.
    """
    lines = [line.split() for name in ("tcp", "tcp6") for line in here.text(f"proc/net/{name}").splitlines()[1:]]
    sockets = {
        f"socket:[{words[9]}]"
        for words in lines
        if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == number
    }
    for file in (here.root / "proc").glob("[0-9]*/fd/*") if sockets else ():
        with contextlib.suppress(OSError):
            if str(file.readlink()) in sockets:
                process = file.parts[-3]
                return f"{here.text(f'proc/{process}/comm')} (process {process})"
    return ""


def _time_left(here: Here) -> Iterator[Finding]:
    """Yield how long the job may still run, where that is known."""
    try:
        left_s = batch_job(here.environ).end_s - here.unix_s
    except WorldError as error:
        yield Finding.refused("time left", error)
        return
    if left_s == NEVER:
        return
    if left_s < _LITTLE_TIME_S:
        found = f"{seconds(left_s)} of the job" if left_s > 0 else "none: the job should have ended"
        yield Finding.look("time left", found, "ask for more with --time, or let the job be requeued")
    else:
        yield Finding.ok("time left", f"{seconds(left_s)} of the job")
