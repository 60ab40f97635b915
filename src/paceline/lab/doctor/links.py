"""Find the interface and address that a rank uses, and the nominal speed of the hardware. Sends nothing. Torch-free."""

import array
import contextlib
import fcntl
import re
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.parallel.interface import address_to, host_address, interface_addresses, is_own_address

SYS_PATH: Final = Path("/sys")
LOOPBACK: Final = "127.0.0.1"
MEGA: Final = 1e6
GIGA: Final = 1e9
# From linux/sockios.h and linux/ethtool.h. The ioctl refers to this network namespace; /sys may be of another one.
_SIOCETHTOOL, _ETHTOOL_GSET = 0x8946, 0x1
_ETHTOOL_CMD: Final = struct.Struct("=IIIHBBBBBBIIHBBIII")
_SPEED, _SPEED_HIGH = 3, 12  # fields of that
_UNKNOWN_SPEEDS: Final = (0, 0xFFFFFFFF)


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
    """Return the interface that gloo listens on: the first of GLOO_SOCKET_IFNAME, else that of the host name.

    Otherwise the loopback (`createDefaultDevice` in torch's csrc/distributed/c10d/ProcessGroupGloo.cpp).
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
    return 0.0 if speed in (*_UNKNOWN_SPEEDS, 0xFFFF) else speed * MEGA
