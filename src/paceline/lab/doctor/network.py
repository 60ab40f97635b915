"""Check the network: host name, gloo's interface, the launcher's variables, and the port of rank 0. Torch-free."""

import contextlib
import socket
from collections.abc import Mapping
from typing import Final

from paceline.core.errors import WorldError
from paceline.lab.doctor.check import (
    GLOO_VARIABLE,
    HostContext,
    Outcome,
    call_with_timeout,
    failure,
    failure_by,
    format_os_error,
    ok,
    warning,
)
from paceline.parallel.environ import world_from_environ
from paceline.parallel.network_interface import (
    address_to,
    host_address,
    interface_addresses,
    is_own_address,
    outward_interfaces,
)

_LOOPBACK: Final = "127.0.0.1"
_LAUNCHER_VARIABLES: Final = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_RESTART_COUNT",
)  # fmt: skip
_MPI_VARIABLES: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def check_host_name(host: HostContext) -> Outcome:
    """Check that this host's name leads to it: gloo announces the address of the name to other ranks."""
    name = socket.gethostname()
    address = find_own_address(name)
    if address:
        return ok(f"{name} is {address}")
    found = f"{name} has no address of this machine"
    advice = f"add `<address> {name}` to /etc/hosts, correct it in the DNS, or set {GLOO_VARIABLE}"
    is_needed = host.spans_nodes and not host.chosen_interface and not host.environ.get(GLOO_VARIABLE)
    return failure(found, advice) if is_needed else warning(found, advice)


def check_gloo(host: HostContext) -> Outcome:
    """Check the interface of ranks on CPUs.

    https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use
    """
    addresses, configured = interface_addresses(), host.environ.get(GLOO_VARIABLE, "")
    names = {name for _, name in socket.if_nameindex()}
    missing = [name for name in configured.split(",") if name and name not in names]
    if missing:
        advice = f"set {GLOO_VARIABLE} to one of {', '.join(sorted(names))}, or unset it"
        return failure(f"{GLOO_VARIABLE}={configured}, but there is no {missing[0]}", advice)
    if not configured and not host.spans_nodes:
        return ok("uses the loopback: all ranks are on this machine")
    name, address = find_gloo_interface({**host.environ, GLOO_VARIABLE: configured or host.chosen_interface})
    by = f"by {GLOO_VARIABLE}" if configured else "by this host's name"
    if host.chosen_interface:
        by = "chosen by paceline, as other hosts cannot reach the address of this host's name"
    found = f"uses {name} {address}".rstrip() + f", {by}"
    if host.spans_nodes and is_own_address(address):
        outward = outward_interfaces(addresses)
        route = address_to(host.world.master_addr)
        usable = [name for name, address in outward.items() if address == route] or [*outward, "NAME"]
        return failure(f"{found}, which no other node can reach", f"set {GLOO_VARIABLE}={usable[0]} on every node")
    return ok(found)


def find_gloo_interface(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return name and address of the interface that gloo listens on: that of the first name in GLOO_SOCKET_IFNAME, of
    the host's name, or the loopback.
    """
    addresses = interface_addresses()
    configured = environ.get(GLOO_VARIABLE, "").split(",")[0]
    if configured:
        return configured, addresses.get(configured, "")
    own = find_own_address(socket.gethostname()) or _LOOPBACK
    return next((name for name, address in addresses.items() if address == own), ""), own


def find_own_address(name: str) -> str:
    """Return the address of this machine that `name` stands for; "" if it has none, or the lookup times out."""
    try:
        return call_with_timeout(lambda: host_address(name))
    except (OSError, UnicodeError):  # UnicodeError: a label is empty or longer than 63 characters
        return ""


def check_launcher(host: HostContext) -> Outcome:
    """Check how ranks are started."""
    found = ", ".join(f"{name}={host.environ[name]}" for name in _LAUNCHER_VARIABLES if name in host.environ)
    try:
        world = world_from_environ(host.environ)
    except WorldError as error:
        return failure_by(error)
    if world.launcher != "single":
        return ok(f"{world.launcher}: rank {world.rank} of {world.world_size} ({found})")
    mpi = next((name for name in _MPI_VARIABLES if host.get_env_int(name, 1) > 1), "")
    if mpi and "SLURM_JOB_ID" not in host.environ:
        what = f"{mpi}={host.environ[mpi]}: each process would train alone"
        return failure(what, "start with torchrun or srun rather than mpirun")
    if "SLURM_JOB_ID" in host.environ and "SLURM_STEP_ID" not in host.environ:
        return warning(found, "start with srun: a batch script gets its signal too late to save a checkpoint")
    return ok(found or "none: set --ranks for several processes")


def check_port(host: HostContext) -> Outcome | None:
    """Check that rank 0 can listen on its port, unless another process or machine opens it."""
    port = _find_port_to_open(host)
    if not port:
        return None
    try:
        if socket.has_dualstack_ipv6():
            socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True).close()
        else:
            socket.create_server(("", port)).close()
    except OSError as error:
        owner = _find_port_owner(host, port)
        found = f"{port} is in use by {owner}" if owner else f"{port} cannot be used: {format_os_error(error)}"
        return failure(found, "stop that program, or set MASTER_PORT to a free port, the same on all ranks")
    return ok(f"{port} is free")


def _find_port_to_open(host: HostContext) -> int:
    world = host.world
    if world.launcher != "single":
        is_ours = world.is_main and world.store_fd < 0 and not world.agent_hosts_store
        return world.master_port if is_ours else 0
    port, address = host.get_env_int("MASTER_PORT", 0), host.environ.get("MASTER_ADDR", "")
    return port if 0 < port < 65_536 and (not address or find_own_address(address)) else 0


def _find_port_owner(host: HostContext, port: int) -> str:
    """Return the program that listens on a port, as `python (process 12)`; "" if it is another user's."""
    psutil = host.import_module("psutil")
    with contextlib.suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid:
                return f"{psutil.Process(each.pid).name()} (process {each.pid})"
    return ""
