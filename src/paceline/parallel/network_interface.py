"""The network interface that ranks on several hosts meet on, where gloo would choose one that only this host can reach.

gloo listens at the first address that this host's name leads to, and at loopback where there is none
(https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, createDefaultDevice).
Debian's installer leads that name to 127.0.1.1, so there no other host can connect. IPv4 on Linux; torch-free.
"""

import fcntl
import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Final

_SIOCGIFADDR: Final = 0x8915
"""Ask for the address of an interface: https://man7.org/linux/man-pages/man7/netdevice.7.html."""
_ANY_PORT: Final = 9
_DOCUMENTATION_ADDRESS: Final = "192.0.2.1"
"""An address of documents, which nobody has (RFC 5737): the way to it is the default route."""
_BRIDGES: Final = ("docker", "br-", "virbr", "veth")
"""Names, by how they begin, of interfaces to this host's own containers and virtual machines."""


def interface_to(master_addr: str) -> str:
    """Return the interface that leads to `master_addr`, or nothing where gloo finds one, and where none can be told.

    On the host that it is, the address may be loopback as well: then it is the only interface that leads to other
    hosts, and of several the one of the default route.
    """
    if not sys.platform.startswith("linux") or not is_own_address(host_address(socket.gethostname())):
        return ""
    found = interface_addresses()
    towards = address_to(master_addr)
    if not is_own_address(towards):
        return next((name for name, address in found.items() if address == towards), "")
    outside = outward_interfaces(found)
    if len(outside) == 1:
        return next(iter(outside))
    default = address_to(_DOCUMENTATION_ADDRESS)
    return next((name for name, address in outside.items() if address == default), "")


def host_address(host: str) -> str:
    """Return the first address of `host` that a socket can be bound to, "" where there is none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.bind(place)
        except OSError:
            continue
        return str(place[0])
    return ""


def address_to(host: str) -> str:
    """Return the address that this host would send to `host` from, "" where there is no way; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((host, _ANY_PORT))  # of datagrams: the kernel looks up its routes
            return str(sock.getsockname()[0])
    except OSError:
        return ""


def interface_addresses() -> dict[str, str]:
    """Return the first IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def outward_interfaces(found: Mapping[str, str]) -> dict[str, str]:
    """Return those of `found`, addresses by interface, that may lead to other hosts."""
    return {
        name: address
        for name, address in found.items()
        if not is_own_address(address) and not name.startswith(_BRIDGES)
    }


def is_own_address(address: str) -> bool:
    """Whether no other host can reach `address`; so it is for no address. Nothing is known of what is none."""
    try:
        return not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
