"""Whether this machine's clock is kept right. How far it is from those of other nodes is for the ranks to find out."""

import ctypes
import struct
import sys
from collections.abc import Callable
from typing import Final

from paceline.core.units import seconds
from paceline.lab.doctor.finding import Finding
from paceline.lab.doctor.here import Here

_ERROR: Final = 5
"""TIME_ERROR, the clock is not synchronised: adjtimex(2)."""
_TIMEX: Final = struct.Struct("@I4xqqqq")
"""The first fields of `struct timex` where a long has 64 bits: modes, offset, freq, and maxerror in microseconds."""
_TIMEX_BYTES: Final = 256  # it has 208

Kept = tuple[int, float]
"""What adjtimex(2) returns, negative where it cannot be asked; and seconds that the clock may be off."""


def kernel_clock() -> Kept:
    """Ask the kernel about its clock, and change nothing."""
    if not sys.platform.startswith("linux") or struct.calcsize("@l") != 8:
        return -1, 0.0
    asked = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes of zero: only tell
    state = ctypes.CDLL(None).adjtimex(asked)
    *_, most_us = _TIMEX.unpack_from(asked.raw)
    return state, most_us / 1e6


def clock_finding(here: Here, ask: Callable[[], Kept] = kernel_clock) -> Finding:
    """Return whether somebody keeps the clock right, which matters where several nodes write their times."""
    state, off_s = ask()
    if state < 0:
        return Finding.ok("clock", "not told by the kernel")
    if state != _ERROR:
        return Finding.ok("clock", f"synchronised, at most {seconds(off_s)} off")
    if here.spans_nodes:
        return Finding.look("clock", "not synchronised, as far as the kernel knows", "run an NTP client (chrony) on it")
    return Finding.ok("clock", "fine for one machine (NTP does not set it, which only several nodes would need)")
