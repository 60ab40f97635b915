"""Which interface a rank talks over, the address it would be called at, and what the hardware is made for. Torch-free.

Nothing is sent. What the links really do is timed in `traffic`.
"""

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

from paceline.parallel.interface import address_to, addresses, own_address, stays_here

SYS: Final = Path("/sys")
LOOPBACK: Final = "127.0.0.1"
MEGA: Final = 1e6
GIGA: Final = 1e9
# Of linux/sockios.h and linux/ethtool.h. A request to the kernel is about the own network, where /sys may be another's.
_SIOCETHTOOL, _ETHTOOL_GSET = 0x8946, 0x1
_ETHTOOL_CMD: Final = struct.Struct("=IIIHBBBBBBIIHBBIII")
_SPEED, _SPEED_HIGH = 3, 12  # fields of that
_UNKNOWN: Final = (0, 0xFFFFFFFF)


@dataclass(frozen=True)
class Interface:
    """A network interface: its IPv4 address ("" without one), and the bits a second of its line (0: not known)."""

    name: str
    address: str = ""
    bit_per_s: float = 0.0


NO_INTERFACE: Final = Interface("")


def interfaces() -> tuple[Interface, ...]:
    """Return the interfaces of this machine, or of this container."""
    having = addresses()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return tuple(
            Interface(name, having.get(name, ""), _bit_per_s(probe, name)) for _, name in socket.if_nameindex()
        )


def chosen_by_gloo(there: Sequence[Interface], environ: Mapping[str, str]) -> Interface:
    """Return the interface that gloo listens on: the first of GLOO_SOCKET_IFNAME, else that of the host's own name.

    Without a name that stands for an address of this host it takes the loopback (`createDefaultDevice` in torch's
    csrc/distributed/c10d/ProcessGroupGloo.cpp).
    """
    asked = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if asked:
        return next((each for each in there if each.name == asked), Interface(asked))
    address = own_address(socket.gethostname()) or LOOPBACK
    return next((each for each in there if each.address == address), Interface("", address))


def towards(there: Sequence[Interface], host: str) -> Interface:
    """Return the interface on the way to `host`, without a word to it; one without a name where there is no way."""
    address = address_to(host)
    return next((each for each in there if address and each.address == address), Interface("", address))


def is_loopback(address: str) -> bool:
    """Return whether only processes of the same host can call `address`."""
    return bool(address) and stays_here(address)


def infiniband_bit_per_s(sys: Path = SYS) -> float:
    """Return what the fastest InfiniBand or RoCE port that is up is made for, in bits a second; 0 where none is."""
    rates = [0.0]
    for port in sys.glob("class/infiniband/*/ports/*"):
        with contextlib.suppress(OSError):
            rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec", (port / "rate").read_text())
            if rate and "ACTIVE" in (port / "state").read_text():
                rates.append(float(rate[1]) * GIGA)
    return max(rates)


def _bit_per_s(probe: socket.socket, name: str) -> float:
    asked = array.array("B", _ETHTOOL_CMD.pack(_ETHTOOL_GSET, *[0] * 17))
    try:
        fcntl.ioctl(probe.fileno(), _SIOCETHTOOL, struct.pack("16sP", name.encode()[:15], asked.buffer_info()[0]))
    except OSError:
        return 0.0
    answer = _ETHTOOL_CMD.unpack(asked.tobytes())
    speed = answer[_SPEED] | answer[_SPEED_HIGH] << 16
    return 0.0 if speed in (*_UNKNOWN, 0xFFFF) else speed * MEGA
