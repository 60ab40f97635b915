"""Check the network: host name, interfaces, the launcher's variables, and the rendezvous of the ranks. Torch-free."""

import array
import contextlib
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.errors import WorldError
from paceline.core.units import number, seconds
from paceline.core.world import NEVER
from paceline.lab.doctor.check import ANSWER_TIMEOUT_S, DoctorFinding, HostContext, call_with_timeout, format_os_error
from paceline.parallel.environ import batch_job, count_gpus, world_from_environ
from paceline.parallel.network_interface import (
    address_to,
    host_address,
    interface_addresses,
    interface_to,
    is_own_address,
    outward_interfaces,
)

SYS_PATH: Final = Path("/sys")
LOOPBACK: Final = "127.0.0.1"
MEGA: Final = 1e6
GIGA: Final = 1e9
# From linux/sockios.h and linux/ethtool.h. The ioctl refers to this network namespace; /sys may be of another one.
_SIOCETHTOOL, _ETHTOOL_GSET = 0x8946, 0x1
_ETHTOOL_CMD: Final = struct.Struct("=IIIHBBBBBBIIHBBIII")
_SPEED, _SPEED_HIGH = 3, 12  # fields of that
_UNKNOWN_SPEEDS: Final = (0, 0xFFFFFFFF)
_SLOW_BIT_PER_S: Final = 1e9
"""At this rate the gradients of ResNet-50, 102 MB, take most of a second."""
_GLOO_VARIABLE: Final = "GLOO_SOCKET_IFNAME"
_LAST_RESORT_PREFIXES: Final = ("docker", "lo", "virbr")
"""Name prefixes that NCCL uses only if there is no other interface, in this order."""
_LAUNCHER_VARIABLES: Final = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_RESTART_COUNT",
)  # fmt: skip
_MPI_VARIABLES: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_LOW_TIME_S: Final = 300.0
_TCP_LISTEN: Final = "0A"
"""TCP_LISTEN of the kernel's net/tcp_states.h."""


@dataclass(frozen=True)
class Interface:
    """A network interface: its IPv4 address ("" if none), and the bits per second of its line (0: unknown)."""

    name: str
    address: str = ""
    bit_per_s: float = 0.0


NO_INTERFACE: Final = Interface("")


def list_interfaces() -> tuple[Interface, ...]:
    """Return the interfaces of this machine or container."""
    having = interface_addresses()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return tuple(
            Interface(name, having.get(name, ""), _query_bit_per_s(probe, name)) for _, name in socket.if_nameindex()
        )


def find_gloo_interface(available: Sequence[Interface], environ: Mapping[str, str]) -> Interface:
    """Return the interface that gloo listens on: the first of GLOO_SOCKET_IFNAME, that of the host name, or the
    loopback.
    """
    configured = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if configured:
        return next((each for each in available if each.name == configured), Interface(configured))
    address = host_address(socket.gethostname()) or LOOPBACK
    return next((each for each in available if each.address == address), Interface("", address))


def find_interface_towards(available: Sequence[Interface], host: str) -> Interface:
    """Return the interface of the route to `host`, without sending to it; one without a name if there is no route."""
    address = address_to(host)
    return next((each for each in available if address and each.address == address), Interface("", address))


def is_loopback(address: str) -> bool:
    """Return whether only processes of this host can connect to `address`."""
    return bool(address) and is_own_address(address)


def read_infiniband_bit_per_s(sys: Path = SYS_PATH) -> float:
    """Return the nominal bits per second of the fastest active InfiniBand or RoCE port; 0 if there is none."""
    rates = [0.0]
    for port in sys.glob("class/infiniband/*/ports/*"):
        with contextlib.suppress(OSError):
            rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec", (port / "rate").read_text())
            if rate and "ACTIVE" in (port / "state").read_text():
                rates.append(float(rate[1]) * GIGA)
    return max(rates)


def _query_bit_per_s(probe: socket.socket, name: str) -> float:
    command = array.array("B", _ETHTOOL_CMD.pack(_ETHTOOL_GSET, *[0] * 17))
    try:
        fcntl.ioctl(probe.fileno(), _SIOCETHTOOL, struct.pack("16sP", name.encode()[:15], command.buffer_info()[0]))
    except OSError:
        return 0.0
    reply = _ETHTOOL_CMD.unpack(command.tobytes())
    speed = reply[_SPEED] | reply[_SPEED_HIGH] << 16
    # Drivers report an unknown speed as 0, or as all ones of 16 or 32 bits.
    return 0.0 if speed in (*_UNKNOWN_SPEEDS, 0xFFFF) else speed * MEGA


def check_network(host: HostContext) -> Iterator[DoctorFinding]:
    """Yield findings on the network."""
    available, chosen = list_interfaces(), _choose_gloo_interface(host)
    name = _check_host_name(host, is_needed=host.spans_nodes and not chosen and not host.environ.get(_GLOO_VARIABLE))
    yield name
    yield _check_loopback()
    yield _check_interfaces(host, available)
    yield _check_gloo(host, available, chosen, has_address=name.state == "ok")
    gpus = count_gpus(host.environ, host.root / "dev")
    if gpus > 1 or (gpus and (host.spans_nodes or host.world.world_size > 1)):
        yield _check_nccl_sockets(host, available)


def _choose_gloo_interface(host: HostContext) -> str:
    # A batch script runs on the first node of its job, which will have rank 0.
    if host.environ.get(_GLOO_VARIABLE) or not host.spans_nodes:
        return ""
    try:
        return call_with_timeout(lambda: interface_to(host.world.master_addr))
    except OSError:
        return ""


def _check_host_name(host: HostContext, *, is_needed: bool) -> DoctorFinding:
    # Gloo announces the address of this host's own name to other ranks.
    name = socket.gethostname()
    verdict = DoctorFinding.problem if is_needed else DoctorFinding.warning
    try:
        addresses = resolve_addresses(name)
    except OSError as error:
        advice = f"add `<address> {name}` to /etc/hosts, add it to the DNS, or set GLOO_SOCKET_IFNAME"
        return verdict("host name", f"{name} has no address ({format_os_error(error)})", advice)
    if not any(is_local_address(address) for address in addresses):
        found = f"{name} is {addresses[0]}, which is not this machine"
        return verdict("host name", found, f"correct {name} in /etc/hosts or the DNS, or set GLOO_SOCKET_IFNAME")
    return DoctorFinding.ok("host name", f"{name} is {addresses[0]}")


def _check_loopback() -> DoctorFinding:
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=ANSWER_TIMEOUT_S).close()
    except OSError as error:
        found = f"{LOOPBACK} cannot be reached: {format_os_error(error)}"
        return DoctorFinding.problem(
            "loopback", found, "bring it up (ip link set lo up): ranks on one machine connect over it"
        )
    return DoctorFinding.ok("loopback", f"{LOOPBACK} can be reached")


def _check_interfaces(host: HostContext, available: Sequence[Interface]) -> DoctorFinding:
    descriptions = [_format_interface(each) for each in available if each.address and not is_loopback(each.address)]
    rate = read_infiniband_bit_per_s(host.root / "sys")
    descriptions += [f"InfiniBand or RoCE ({number(rate / GIGA)} Gbit/s)"] if rate else []
    found = ", ".join(descriptions) or "only the loopback"
    if host.spans_nodes and not rate and not _list_external_interfaces(available):
        what = f"{found}, which reach no other host" if descriptions else found
        return DoctorFinding.problem("interfaces", what, "start the container with the host's network")
    return DoctorFinding.ok("interfaces", found)


def _check_gloo(
    host: HostContext, available: Sequence[Interface], own_choice: str, *, has_address: bool
) -> DoctorFinding:
    """Return the interface of ranks on CPUs.

    https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use
    """
    names = {each.name for each in available}
    configured = host.environ.get(_GLOO_VARIABLE, "")
    missing = [name for name in configured.split(",") if name and name not in names]
    if missing:
        advice = f"set {_GLOO_VARIABLE} to one of {', '.join(sorted(names))}, or unset it"
        return DoctorFinding.problem("gloo", f"{_GLOO_VARIABLE}={configured}, but there is no {missing[0]}", advice)
    if not configured and not host.spans_nodes:
        return DoctorFinding.ok("gloo", "uses the loopback: all ranks are on this machine")
    environ = {**host.environ, _GLOO_VARIABLE: configured or own_choice}
    # Without an address the host name is not looked up again, as that may take long.
    chosen = (
        find_gloo_interface(available, environ) if configured or own_choice or has_address else Interface("", LOOPBACK)
    )
    by = (
        "chosen by paceline, as other hosts cannot reach the address of this host's name"
        if own_choice
        else "by this host's name"
    )
    found = f"uses {_format_interface(chosen)}, {f'by {_GLOO_VARIABLE}' if configured else by}"
    return (
        _check_gloo_between_nodes(host, available, chosen, found)
        if host.spans_nodes
        else DoctorFinding.ok("gloo", found)
    )


def _check_gloo_between_nodes(
    host: HostContext, available: Sequence[Interface], chosen: Interface, found: str
) -> DoctorFinding:
    way, others = find_interface_towards(available, host.world.master_addr), _list_external_interfaces(available)
    if is_loopback(chosen.address):
        name = next((each.name for each in (way, *others) if each in others), "NAME")
        return DoctorFinding.problem(
            "gloo", f"{found}, which no other node can reach", f"set {_GLOO_VARIABLE}={name} on every node"
        )
    fastest = max(others, key=lambda each: each.bit_per_s, default=chosen)
    if 0 < chosen.bit_per_s <= _SLOW_BIT_PER_S and fastest.bit_per_s > chosen.bit_per_s:
        advice = f"set {_GLOO_VARIABLE}={fastest.name} on every node, if all have it: {_format_interface(fastest)}"
        return DoctorFinding.warning("gloo", f"{found}, which is slow", advice)
    return DoctorFinding.ok("gloo", found)


def _check_nccl_sockets(host: HostContext, available: Sequence[Interface]) -> DoctorFinding:
    # NCCL needs sockets for its bootstrap even with InfiniBand, and without it for all data.
    configured = host.environ.get("NCCL_SOCKET_IFNAME", "")
    chosen = find_nccl_interfaces(available, configured)
    if not chosen:
        names = ", ".join(sorted(each.name for each in available if each.address))
        advice = f"set NCCL_SOCKET_IFNAME to a prefix of one of these, or unset it: {names}"
        return DoctorFinding.problem("NCCL's sockets", f"NCCL_SOCKET_IFNAME={configured} matches no interface", advice)
    why = "by NCCL_SOCKET_IFNAME" if configured else "by default"
    return DoctorFinding.ok("NCCL's sockets", f"would use {', '.join(map(_format_interface, chosen))}, {why}")


def find_nccl_interfaces(available: Sequence[Interface], configured: str) -> list[Interface]:
    """Return the interfaces of NCCL's sockets; `configured` is NCCL_SOCKET_IFNAME.

    Without it: those named `ib...`, else all but docker's, the loopback and libvirt's, else those, one kind after the
    other. https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname, and
    `ncclFindInterfaces` in NCCL's src/misc/socket.cc.
    """
    filters = (
        [configured] if len(configured) > 1 else ["ib", f"^{','.join(_LAST_RESORT_PREFIXES)}", *_LAST_RESORT_PREFIXES]
    )
    with_address = [each for each in available if each.address]
    fitting = ([each for each in with_address if _matches_filter(each.name, pattern)] for pattern in filters)
    return next((each for each in fitting if each), [])


def _matches_filter(name: str, pattern: str) -> bool:
    # Comma-separated prefixes, or exact names after `=`; `^` inverts the filter.
    excludes, pattern = pattern.startswith("^"), pattern.removeprefix("^")
    exactly, pattern = pattern.startswith("="), pattern.removeprefix("=")
    each = [word.partition(":")[0] for word in pattern.split(",") if word]
    return excludes != (name in each if exactly else name.startswith(tuple(each)))


def resolve_addresses(name: str) -> list[str]:
    """Return the addresses of a host name. Raise `OSError` if it has none or the lookup times out."""
    try:
        results = call_with_timeout(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except UnicodeError as error:  # a label of the name is empty or longer than 63 characters
        raise OSError(str(error)) from None
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in results))


def is_local_address(address: str) -> bool:
    """Return whether an address is this machine's."""
    # A socket can be bound to an address of this machine only.
    version = ipaddress.ip_address(address.partition("%")[0]).version
    try:
        with socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_STREAM) as trial:
            trial.bind((address, 0))
    except OSError:
        return False
    return True


def _list_external_interfaces(available: Sequence[Interface]) -> list[Interface]:
    names = outward_interfaces({each.name: each.address for each in available})
    return [each for each in available if each.name in names]


def _format_interface(each: Interface) -> str:
    speed = f" ({number(each.bit_per_s / GIGA)} Gbit/s)" if each.bit_per_s else ""
    return f"{each.name} {each.address}".strip() + speed


def check_rendezvous(host: HostContext) -> Iterator[DoctorFinding]:
    """Check how ranks are started, where they connect, and how long they may run."""
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
    # Stale torchrun variables win over Slurm's, and would hide that it started several tasks.
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
