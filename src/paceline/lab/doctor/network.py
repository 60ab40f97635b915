"""Check the network: host name, loopback, interfaces, and which of them the ranks use."""

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from typing import Final

from paceline.core.units import number
from paceline.lab.doctor.finding import DoctorFinding
from paceline.lab.doctor.here import HostContext, format_os_error
from paceline.lab.doctor.links import (
    GIGA,
    LOOPBACK,
    Interface,
    find_gloo_interface,
    find_interface_towards,
    is_loopback,
    list_interfaces,
    read_infiniband_bit_per_s,
)
from paceline.lab.doctor.patience import ANSWER_TIMEOUT_S, call_with_timeout
from paceline.parallel.environ import count_gpus
from paceline.parallel.interface import interface_to, outward_interfaces

_SLOW_BIT_PER_S: Final = 1e9
"""At this rate the gradients of ResNet-50, 102 MB, take most of a second."""
_GLOO_VARIABLE: Final = "GLOO_SOCKET_IFNAME"
_LAST_RESORT_PREFIXES: Final = ("docker", "lo", "virbr")
"""Name prefixes that NCCL uses only if there is no other interface, in this order."""


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
    """Return the interface that a run would set for gloo, as `cli.ranks` does, or ""."""
    # A batch script runs on the first node of its job, which will have rank 0.
    if host.environ.get(_GLOO_VARIABLE) or not host.spans_nodes:
        return ""
    try:
        return call_with_timeout(lambda: interface_to(host.world.master_addr))
    except OSError:
        return ""


def _check_host_name(host: HostContext, *, is_needed: bool) -> DoctorFinding:
    """Look up this host's own name, by which gloo finds the address that it announces."""
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
    """Return whether other nodes are reachable over `chosen`, and whether another interface is faster."""
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
    """Return the interfaces of NCCL's sockets, for its bootstrap and for data without InfiniBand."""
    configured = host.environ.get("NCCL_SOCKET_IFNAME", "")
    chosen = find_nccl_interfaces(available, configured)
    if not chosen:
        names = ", ".join(sorted(each.name for each in available if each.address))
        advice = f"set NCCL_SOCKET_IFNAME to a prefix of one of these, or unset it: {names}"
        return DoctorFinding.problem("NCCL's sockets", f"NCCL_SOCKET_IFNAME={configured} matches no interface", advice)
    why = "by NCCL_SOCKET_IFNAME" if configured else "by default"
    return DoctorFinding.ok("NCCL's sockets", f"would use {', '.join(map(_format_interface, chosen))}, {why}")


def find_nccl_interfaces(available: Sequence[Interface], configured: str) -> list[Interface]:
    """Return the interfaces of NCCL's sockets; `asked` is NCCL_SOCKET_IFNAME.

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
    """Return whether a name matches a filter: prefixes, exact names after `=`, inverted after `^`."""
    excludes, pattern = pattern.startswith("^"), pattern.removeprefix("^")
    exactly, pattern = pattern.startswith("="), pattern.removeprefix("=")
    each = [word.partition(":")[0] for word in pattern.split(",") if word]
    return excludes != (name in each if exactly else name.startswith(tuple(each)))


def resolve_addresses(name: str) -> list[str]:
    """Return the addresses of a host name. Raise `OSError` if it has none or the lookup times out."""
    try:
        results = call_with_timeout(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except UnicodeError as error:  # an empty or an endless part between two dots
        raise OSError(str(error)) from None
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in results))


def is_local_address(address: str) -> bool:
    """Return whether a socket can be bound to an address, that is, whether it is this machine's."""
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
