"""How this machine is called and reached: its name, its loopback, its interfaces, and which of them ranks talk over."""

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
"""In which a ResNet-50's gradients, 102 MB, take most of a second."""
_ASKED: Final = "GLOO_SOCKET_IFNAME"
_LAST: Final = ("docker", "lo", "virbr")
"""Names, by how they begin, that NCCL takes where there is no other, in this order."""


def network_findings(here: Here) -> Iterator[Finding]:
    """Yield what there is to know of the network."""
    there, ours = interfaces(), _ours(here)
    name = _host_name(here, is_needed=here.spans_nodes and not ours and not here.environ.get(_ASKED))
    yield name
    yield _loopback()
    yield _interfaces(here, there)
    yield _gloo(here, there, ours, has_address=name.state == "ok")
    gpus = count_gpus(here.environ, here.root / "dev")
    if gpus > 1 or (gpus and (here.spans_nodes or here.world.world_size > 1)):
        yield _nccl(here, there)


def _ours(here: Here) -> str:
    """Return the interface that a run would tell gloo to take, as `cli.ranks` does, "" where it would not.

    A batch script runs on the first node of its job, where rank 0 is going to be.
    """
    if here.environ.get(_ASKED) or not here.spans_nodes:
        return ""
    try:
        return answer(lambda: interface_to(here.world.master_addr))
    except OSError:
        return ""


def _host_name(here: Here, *, is_needed: bool) -> Finding:
    """Look the host's own name up, by which gloo finds the address that it gives to others; a run may need it."""
    name = socket.gethostname()
    verdict = Finding.wrong if is_needed else Finding.look
    try:
        addresses = addresses_of(name)
    except OSError as error:
        advice = f"add `<address> {name}` to /etc/hosts, ask who runs the DNS, or set GLOO_SOCKET_IFNAME"
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
        return Finding.wrong("loopback", found, "bring it up (ip link set lo up): ranks on one machine meet there")
    return Finding.ok("loopback", f"{LOOPBACK} can be reached")


def _interfaces(here: Here, there: Sequence[Interface]) -> Finding:
    told = [_told(each) for each in there if each.address and not is_loopback(each.address)]
    rate = infiniband_bit_per_s(here.root / "sys")
    told += [f"InfiniBand or RoCE ({number(rate / GIGA)} Gbit/s)"] if rate else []
    found = ", ".join(told) or "the loopback alone"
    if here.spans_nodes and not rate and not _outward(there):
        what = f"{found}, which lead to no other host" if told else found
        return Finding.wrong("interfaces", what, "start the container with the host's network")
    return Finding.ok("interfaces", found)


def _gloo(here: Here, there: Sequence[Interface], ours: str, *, has_address: bool) -> Finding:
    """Return what ranks on CPUs talk over. The host's own name is not looked up again where it has no address.

    https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use
    """
    names = {each.name for each in there}
    asked = here.environ.get(_ASKED, "")
    missing = [name for name in asked.split(",") if name and name not in names]
    if missing:
        advice = f"set {_ASKED} to one of {', '.join(sorted(names))}, or unset it"
        return Finding.wrong("gloo", f"{_ASKED}={asked}, and there is no {missing[0]}", advice)
    if not asked and not here.spans_nodes:
        return Finding.ok("gloo", "takes the loopback: all ranks are on this machine")
    environ = {**here.environ, _ASKED: asked or ours}
    chosen = chosen_by_gloo(there, environ) if asked or ours or has_address else Interface("", LOOPBACK)
    by = "by paceline, as no other host can call where this host's name leads" if ours else "by the name of this host"
    found = f"takes {_told(chosen)}, {f'by {_ASKED}' if asked else by}"
    return _between_nodes(here, there, chosen, found) if here.spans_nodes else Finding.ok("gloo", found)


def _between_nodes(here: Here, there: Sequence[Interface], chosen: Interface, found: str) -> Finding:
    """Return whether other nodes can be reached over what is `chosen`, and whether a faster interface could be."""
    way, others = towards(there, here.world.master_addr), _outward(there)
    if is_loopback(chosen.address):
        name = next((each.name for each in (way, *others) if each in others), "NAME")
        return Finding.wrong("gloo", f"{found}, where no other node can reach it", f"set {_ASKED}={name} on every node")
    fastest = max(others, key=lambda each: each.bit_per_s, default=chosen)
    if 0 < chosen.bit_per_s <= _SLOW_BIT_PER_S and fastest.bit_per_s > chosen.bit_per_s:
        advice = f"set {_ASKED}={fastest.name} on every node, if all have it: {_told(fastest)}"
        return Finding.look("gloo", f"{found}, which is slow", advice)
    return Finding.ok("gloo", found)


def _nccl(here: Here, there: Sequence[Interface]) -> Finding:
    """Return what ranks on GPUs of several nodes meet over, and talk over where there is no InfiniBand."""
    asked = here.environ.get("NCCL_SOCKET_IFNAME", "")
    chosen = chosen_by_nccl(there, asked)
    if not chosen:
        names = ", ".join(sorted(each.name for each in there if each.address))
        advice = f"set NCCL_SOCKET_IFNAME to what one of these begins with, or unset it: {names}"
        return Finding.wrong("NCCL's sockets", f"NCCL_SOCKET_IFNAME={asked} fits no interface", advice)
    why = "by NCCL_SOCKET_IFNAME" if asked else "unasked"
    return Finding.ok("NCCL's sockets", f"would take {', '.join(map(_told, chosen))}, {why}")


def chosen_by_nccl(there: Sequence[Interface], asked: str) -> list[Interface]:
    """Return the interfaces whose sockets NCCL uses: those that NCCL_SOCKET_IFNAME, `asked`, fits, where it is set.

    Else those named `ib...`; else all but docker's, the loopback and libvirt's; else those, one kind after the other.
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname, and `ncclFindInterfaces` in
    NCCL's src/misc/socket.cc.
    """
    filters = [asked] if len(asked) > 1 else ["ib", f"^{','.join(_LAST)}", *_LAST]
    with_address = [each for each in there if each.address]
    fitting = ([each for each in with_address if _fits(each.name, words)] for words in filters)
    return next((each for each in fitting if each), [])


def _fits(name: str, words: str) -> bool:
    """Whether a name begins with one of `words`, or is one where they begin with `=`; the contrary after a `^`."""
    excludes, words = words.startswith("^"), words.removeprefix("^")
    exactly, words = words.startswith("="), words.removeprefix("=")
    each = [word.partition(":")[0] for word in words.split(",") if word]
    return excludes != (name in each if exactly else name.startswith(tuple(each)))


def addresses_of(name: str) -> list[str]:
    """Return the addresses that a name stands for. Raise `OSError` where it has none, or nobody answers."""
    try:
        found = answer(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except UnicodeError as error:  # an empty or an endless part between two dots
        raise OSError(str(error)) from None
    return list(dict.fromkeys(str(place[0]) for *_, place in found))


def is_local(address: str) -> bool:
    """Whether an address is this machine's: only then can a socket be bound to it."""
    version = ipaddress.ip_address(address.partition("%")[0]).version
    try:
        with socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_STREAM) as trial:
            trial.bind((address, 0))
    except OSError:
        return False
    return True


def _outward(there: Sequence[Interface]) -> list[Interface]:
    names = outward({each.name: each.address for each in there})
    return [each for each in there if each.name in names]


def _told(each: Interface) -> str:
    speed = f" ({number(each.bit_per_s / GIGA)} Gbit/s)" if each.bit_per_s else ""
    return f"{each.name} {each.address}".strip() + speed
