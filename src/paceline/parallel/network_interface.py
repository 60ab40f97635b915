"""Choose gloo's network interface on nodes where its default cannot be reached from others. IPv4, Linux, torch-free.

gloo listens at the first address that the host name resolves to, and at loopback if there is none
(https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, createDefaultDevice).
Debian's installer resolves it to 127.0.1.1.
"""

import fcntl
import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Final

_SIOCGIFADDR: Final = 0x8915
"""Request code for the address of an interface: https://man7.org/linux/man-pages/man7/netdevice.7.html."""
_ANY_PORT: Final = 9
_DOCUMENTATION_ADDRESS: Final = "192.0.2.1"
"""Reserved for documentation (RFC 5737), so the route to it is the default route."""
_BRIDGES: Final = ("docker", "br-", "virbr", "veth")
"""Prefixes of interfaces to containers and virtual machines of this host."""


def interface_to(master_addr: str) -> str:
    """Return the interface to `master_addr`, or "" if gloo's default works or none can be determined."""
    if not sys.platform.startswith("linux") or not is_own_address(host_address(socket.gethostname())):
        return ""
    addresses = interface_addresses()
    source = address_to(master_addr)
    if not is_own_address(source):
        return next((name for name, address in addresses.items() if address == source), "")
    # This host is `master_addr`: choose the only interface that leads to other hosts, or that of the default route.
    outward = outward_interfaces(addresses)
    if len(outward) == 1:
        return next(iter(outward))
    default = address_to(_DOCUMENTATION_ADDRESS)
    return next((name for name, address in outward.items() if address == default), "")


def host_address(host: str) -> str:
    """Return the first address of `host` that a socket can be bound to, "" if there is none."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    for family, kind, protocol, _, address in infos:
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.bind(address)
        except OSError:
            continue
        return str(address[0])
    return ""


def address_to(host: str) -> str:
    """Return the source address for packets to `host`, "" if there is no route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((host, _ANY_PORT))  # UDP: looks up the route and sends nothing
            return str(sock.getsockname()[0])
    except OSError:
        return ""


def interface_addresses() -> dict[str, str]:
    """Return the first IPv4 address of each interface that has one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # no IPv4 address
                continue
            addresses[name] = socket.inet_ntoa(reply[20:24])
    return addresses


def outward_interfaces(found: Mapping[str, str]) -> dict[str, str]:
    """Return those of `found`, addresses by interface, that may lead to other hosts."""
    return {
        name: address
        for name, address in found.items()
        if not is_own_address(address) and not name.startswith(_BRIDGES)
    }


def is_own_address(address: str) -> bool:
    """Return whether `address` is loopback or empty, so that other hosts cannot reach it; False for host names."""
    try:
        return not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
