"""Check the network: host name, loopback, interfaces, and which of them the ranks use."""

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from typing import Final

from paceline.core.units import number
from paceline.lab.doctor.finding import Finding
from paceline.lab.doctor.here import Here, reason
from paceline.lab.doctor.links import (
    GIGA,
    LOOPBACK,
    Interface,
    chosen_by_gloo,
    infiniband_bit_per_s,
    interfaces,
    is_loopback,
    towards,
)
from paceline.lab.doctor.patience import WAIT_S, answer
from paceline.parallel.environ import count_gpus
from paceline.parallel.interface import interface_to, outward

_SLOW_BIT_PER_S: Final = 1e9
"""At this rate the gradients of ResNet-50, 102 MB, take most of a second."""
_ASKED: Final = "GLOO_SOCKET_IFNAME"
_LAST: Final = ("docker", "lo", "virbr")
"""Name prefixes that NCCL uses only if there is no other interface, in this order."""


def network_findings(host: Here) -> Iterator[Finding]:
    """Yield findings on the network."""
    available, chosen = interfaces(), _ours(host)
    name = _host_name(host, is_needed=host.spans_nodes and not chosen and not host.environ.get(_ASKED))
    yield name
    yield _loopback()
    yield _interfaces(host, available)
    yield _gloo(host, available, chosen, has_address=name.state == "ok")
    gpus = count_gpus(host.environ, host.root / "dev")
    if gpus > 1 or (gpus and (host.spans_nodes or host.world.world_size > 1)):
        yield _nccl(host, available)


def _ours(host: Here) -> str:
    """Return the interface that a run would set for gloo, as `cli.ranks` does, or ""."""
    # A batch script runs on the first node of its job, which will have rank 0.
    if host.environ.get(_ASKED) or not host.spans_nodes:
        return ""
    try:
        return answer(lambda: interface_to(host.world.master_addr))
    except OSError:
        return ""


def _host_name(host: Here, *, is_needed: bool) -> Finding:
    """Look up this host's own name, by which gloo finds the address that it announces."""
    name = socket.gethostname()
    verdict = Finding.wrong if is_needed else Finding.look
    try:
        addresses = addresses_of(name)
    except OSError as error:
        advice = f"add `<address> {name}` to /etc/hosts, add it to the DNS, or set GLOO_SOCKET_IFNAME"
        return verdict("host name", f"{name} has no address ({reason(error)})", advice)
    if not any(is_local(address) for address in addresses):
        found = f"{name} is {addresses[0]}, which is not this machine"
        return verdict("host name", found, f"correct {name} in /etc/hosts or the DNS, or set GLOO_SOCKET_IFNAME")
    return Finding.ok("host name", f"{name} is {addresses[0]}")


def _loopback() -> Finding:
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=WAIT_S).close()
    except OSError as error:
        found = f"{LOOPBACK} cannot be reached: {reason(error)}"
        return Finding.wrong("loopback", found, "bring it up (ip link set lo up): ranks on one machine connect over it")
    return Finding.ok("loopback", f"{LOOPBACK} can be reached")


def _interfaces(host: Here, available: Sequence[Interface]) -> Finding:
    descriptions = [_told(each) for each in available if each.address and not is_loopback(each.address)]
    rate = infiniband_bit_per_s(host.root / "sys")
    descriptions += [f"InfiniBand or RoCE ({number(rate / GIGA)} Gbit/s)"] if rate else []
    found = ", ".join(descriptions) or "only the loopback"
    if host.spans_nodes and not rate and not _outward(available):
        what = f"{found}, which reach no other host" if descriptions else found
        return Finding.wrong("interfaces", what, "start the container with the host's network")
    return Finding.ok("interfaces", found)


def _gloo(host: Here, available: Sequence[Interface], own_choice: str, *, has_address: bool) -> Finding:
    """Return the interface of ranks on CPUs.

    https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use
    """
    names = {each.name for each in available}
    configured = host.environ.get(_ASKED, "")
    missing = [name for name in configured.split(",") if name and name not in names]
    if missing:
        advice = f"set {_ASKED} to one of {', '.join(sorted(names))}, or unset it"
        return Finding.wrong("gloo", f"{_ASKED}={configured}, but there is no {missing[0]}", advice)
    if not configured and not host.spans_nodes:
        return Finding.ok("gloo", "uses the loopback: all ranks are on this machine")
    environ = {**host.environ, _ASKED: configured or own_choice}
    # Without an address the host name is not looked up again, as that may take long.
    chosen = chosen_by_gloo(available, environ) if configured or own_choice or has_address else Interface("", LOOPBACK)
    by = (
        "chosen by paceline, as other hosts cannot reach the address of this host's name"
        if own_choice
        else "by this host's name"
    )
    found = f"uses {_told(chosen)}, {f'by {_ASKED}' if configured else by}"
    return _between_nodes(host, available, chosen, found) if host.spans_nodes else Finding.ok("gloo", found)


def _between_nodes(host: Here, available: Sequence[Interface], chosen: Interface, found: str) -> Finding:
    """Return whether other nodes are reachable over `chosen`, and whether another interface is faster."""
    way, others = towards(available, host.world.master_addr), _outward(available)
    if is_loopback(chosen.address):
        name = next((each.name for each in (way, *others) if each in others), "NAME")
        return Finding.wrong("gloo", f"{found}, which no other node can reach", f"set {_ASKED}={name} on every node")
    fastest = max(others, key=lambda each: each.bit_per_s, default=chosen)
    if 0 < chosen.bit_per_s <= _SLOW_BIT_PER_S and fastest.bit_per_s > chosen.bit_per_s:
        advice = f"set {_ASKED}={fastest.name} on every node, if all have it: {_told(fastest)}"
        return Finding.look("gloo", f"{found}, which is slow", advice)
    return Finding.ok("gloo", found)


def _nccl(host: Here, available: Sequence[Interface]) -> Finding:
    """Return the interfaces of NCCL's sockets, for its bootstrap and for data without InfiniBand."""
    configured = host.environ.get("NCCL_SOCKET_IFNAME", "")
    chosen = chosen_by_nccl(available, configured)
    if not chosen:
        names = ", ".join(sorted(each.name for each in available if each.address))
        advice = f"set NCCL_SOCKET_IFNAME to a prefix of one of these, or unset it: {names}"
        return Finding.wrong("NCCL's sockets", f"NCCL_SOCKET_IFNAME={configured} matches no interface", advice)
    why = "by NCCL_SOCKET_IFNAME" if configured else "by default"
    return Finding.ok("NCCL's sockets", f"would use {', '.join(map(_told, chosen))}, {why}")


def chosen_by_nccl(available: Sequence[Interface], configured: str) -> list[Interface]:
    """Return the interfaces of NCCL's sockets; `asked` is NCCL_SOCKET_IFNAME.

    Without it: those named `ib...`, else all but docker's, the loopback and libvirt's, else those, one kind after the
    other. https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname, and
    `ncclFindInterfaces` in NCCL's src/misc/socket.cc.
    """
    filters = [configured] if len(configured) > 1 else ["ib", f"^{','.join(_LAST)}", *_LAST]
    with_address = [each for each in available if each.address]
    fitting = ([each for each in with_address if _fits(each.name, pattern)] for pattern in filters)
    return next((each for each in fitting if each), [])


def _fits(name: str, pattern: str) -> bool:
    """Return whether a name matches a filter: prefixes, exact names after `=`, inverted after `^`."""
    excludes, pattern = pattern.startswith("^"), pattern.removeprefix("^")
    exactly, pattern = pattern.startswith("="), pattern.removeprefix("=")
    each = [word.partition(":")[0] for word in pattern.split(",") if word]
    return excludes != (name in each if exactly else name.startswith(tuple(each)))


def addresses_of(name: str) -> list[str]:
    """Return the addresses of a host name. Raise `OSError` if it has none or the lookup times out."""
    try:
        results = answer(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except UnicodeError as error:  # an empty or an endless part between two dots
        raise OSError(str(error)) from None
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in results))


def is_local(address: str) -> bool:
    """Return whether a socket can be bound to an address, that is, whether it is this machine's."""
    version = ipaddress.ip_address(address.partition("%")[0]).version
    try:
        with socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_STREAM) as trial:
            trial.bind((address, 0))
    except OSError:
        return False
    return True


def _outward(available: Sequence[Interface]) -> list[Interface]:
    names = outward({each.name: each.address for each in available})
    return [each for each in available if each.name in names]


def _told(each: Interface) -> str:
    speed = f" ({number(each.bit_per_s / GIGA)} Gbit/s)" if each.bit_per_s else ""
    return f"{each.name} {each.address}".strip() + speed
