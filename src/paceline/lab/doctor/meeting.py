"""Check the rendezvous of a run: the launcher's variables, rank 0's address and port, and the time left."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Final

from paceline.core.errors import WorldError
from paceline.core.units import seconds
from paceline.core.world import NEVER
from paceline.lab.doctor.finding import DoctorFinding
from paceline.lab.doctor.here import HostContext, format_os_error
from paceline.lab.doctor.network import is_local_address, resolve_addresses
from paceline.parallel.environ import batch_job, world_from_environ

_LAUNCHER_VARIABLES: Final = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_RESTART_COUNT",
)  # fmt: skip
_MPI_VARIABLES: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_LOW_TIME_S: Final = 300.0
_TCP_LISTEN: Final = "0A"
"""TCP_LISTEN of the kernel's net/tcp_states.h."""


def check_rendezvous(host: HostContext) -> Iterator[DoctorFinding]:
    """Yield how ranks are started, where they connect, and how long they may run."""
    yield _check_launcher(host)
    yield from _check_address(host)
    yield from _check_port(host)
    yield from _check_time_left(host)


def _check_launcher(host: HostContext) -> DoctorFinding:
    found = ", ".join(f"{name}={host.environ[name]}" for name in _LAUNCHER_VARIABLES if name in host.environ)
    try:
        world = world_from_environ(host.environ)
    except WorldError as error:
        return DoctorFinding.from_error("launcher", error)
    hidden = _find_hidden_tasks(host)
    if hidden:
        return DoctorFinding.problem("launcher", f"{found}: {hidden}", "unset RANK and WORLD_SIZE before srun")
    if world.launcher != "single":
        return DoctorFinding.ok("launcher", f"{world.launcher}: rank {world.rank} of {world.world_size} ({found})")
    mpi = next((name for name in _MPI_VARIABLES if host.get_env_int(name, 1) > 1), "")
    if mpi and "SLURM_JOB_ID" not in host.environ:
        what = f"{mpi}={host.environ[mpi]}: each process would train alone"
        return DoctorFinding.problem("launcher", what, "start with torchrun or srun rather than mpirun")
    if "SLURM_JOB_ID" in host.environ and "SLURM_STEP_ID" not in host.environ:
        return DoctorFinding.warning(
            "launcher", found, "start with srun: a batch script gets its signal too late to save a checkpoint"
        )
    return DoctorFinding.ok("launcher", found or "none: set --ranks for several processes")


def _find_hidden_tasks(host: HostContext) -> str:
    """Return how stale torchrun variables hide that Slurm started several tasks, or ""."""
    tasks = host.get_env_int("SLURM_STEP_NUM_TASKS", 1)
    if tasks < 2 or "TORCHELASTIC_RUN_ID" in host.environ or "PACELINE_LAUNCHER_PID" in host.environ:
        return ""
    named = (host.environ.get("RANK"), host.environ.get("WORLD_SIZE"))
    if None in named or named == (host.environ.get("SLURM_PROCID"), str(tasks)):
        return ""
    return f"the variables of torchrun contradict Slurm's, which has started {tasks} tasks"


def _check_address(host: HostContext) -> Iterator[DoctorFinding]:
    address = host.environ.get("MASTER_ADDR", "") if host.world.launcher == "single" else host.world.master_addr
    if not address or host.world.launcher == "local":
        return
    try:
        addresses = resolve_addresses(address)
    except OSError as error:
        advice = "set MASTER_ADDR to the name or address of rank 0's machine, as scontrol show node prints it"
        yield DoctorFinding.problem("meeting point", f"{address!r} has no address ({format_os_error(error)})", advice)
        return
    yield DoctorFinding.ok("meeting point", f"{address} is {addresses[0]}" if address != addresses[0] else address)


def _check_port(host: HostContext) -> Iterator[DoctorFinding]:
    """Yield whether rank 0's port is free, on the host of rank 0."""
    number = _find_port_to_open(host)
    if not number:
        return
    try:
        _listen_once(number)
    except OSError as error:
        holder = find_port_owner(host, number)
        what = f"{number} is in use by {holder}" if holder else f"{number} cannot be used: {format_os_error(error)}"
        yield DoctorFinding.problem(
            "port", what, "stop that program, or set MASTER_PORT to a free port, the same on all ranks"
        )
        return
    yield DoctorFinding.ok("port", f"{number} is free")


def _find_port_to_open(host: HostContext) -> int:
    """Return the port that this process would open as rank 0; 0 if none."""
    world = host.world
    if world.launcher != "single":
        is_ours = world.is_main and world.store_fd < 0 and not world.agent_hosts_store
        return world.master_port if is_ours else 0
    number, address = host.get_env_int("MASTER_PORT", 0), host.environ.get("MASTER_ADDR", "")
    if not 0 < number < 65_536:
        return 0
    with contextlib.suppress(OSError):
        return number if not address or any(map(is_local_address, resolve_addresses(address))) else 0
    return 0


def _listen_once(number: int) -> None:
    if socket.has_dualstack_ipv6():
        socket.create_server(("", number), family=socket.AF_INET6, dualstack_ipv6=True).close()
    else:
        socket.create_server(("", number)).close()


def find_port_owner(host: HostContext, number: int) -> str:
    """Return the program that listens on a port, as `python (process 12)`; "" if unknown."""
    # proc(5): sockets of /proc/net/tcp are files in /proc/PID/fd, which only a process's owner may list.
    lines = [line.split() for name in ("tcp", "tcp6") for line in host.read_text(f"proc/net/{name}").splitlines()[1:]]
    sockets = {
        f"socket:[{fields[9]}]"
        for fields in lines
        if fields[3] == _TCP_LISTEN and int(fields[1].rpartition(":")[2], 16) == number
    }
    for file in (host.root / "proc").glob("[0-9]*/fd/*") if sockets else ():
        with contextlib.suppress(OSError):
            if str(file.readlink()) in sockets:
                process = file.parts[-3]
                return f"{host.read_text(f'proc/{process}/comm')} (process {process})"
    return ""


def _check_time_left(host: HostContext) -> Iterator[DoctorFinding]:
    try:
        left_s = batch_job(host.environ).end_s - host.unix_s
    except WorldError as error:
        yield DoctorFinding.from_error("time left", error)
        return
    if left_s == NEVER:
        return
    if left_s < _LOW_TIME_S:
        found = f"{seconds(left_s)} of the job" if left_s > 0 else "none: the job is past its time limit"
        yield DoctorFinding.warning("time left", found, "request more with --time, or let the job be requeued")
    else:
        yield DoctorFinding.ok("time left", f"{seconds(left_s)} of the job")
