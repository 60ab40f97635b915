"""Check that this machine's clock is synchronized. `doctor.clocks` compares the clocks of nodes."""

import ctypes
import struct
import sys
from collections.abc import Callable
from typing import Final

from paceline.core.units import seconds
from paceline.lab.doctor.finding import DoctorFinding
from paceline.lab.doctor.here import HostContext

_TIME_ERROR: Final = 5
"""TIME_ERROR, the clock is not synchronized: adjtimex(2)."""
_TIMEX: Final = struct.Struct("@I4xqqqq")
"""First fields of `struct timex` with a 64-bit long: modes, offset, freq, and maxerror in microseconds."""
_TIMEX_BYTES: Final = 256  # it has 208

KernelClock = tuple[int, float]
"""Return value of adjtimex(2), negative if unavailable; and the maximum error of the clock in seconds."""


def read_kernel_clock() -> KernelClock:
    """Query the kernel's clock state without changing it."""
    if not sys.platform.startswith("linux") or struct.calcsize("@l") != 8:
        return -1, 0.0
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes = 0: read only
    state = ctypes.CDLL(None).adjtimex(buffer)
    *_, max_error_us = _TIMEX.unpack_from(buffer.raw)
    return state, max_error_us / 1e6


def check_clock(host: HostContext, read_clock: Callable[[], KernelClock] = read_kernel_clock) -> DoctorFinding:
    """Return whether the clock is synchronized, which matters if several nodes write timestamps."""
    state, off_s = read_clock()
    if state < 0:
        return DoctorFinding.ok("clock", "not reported by the kernel")
    if state != _TIME_ERROR:
        return DoctorFinding.ok("clock", f"synchronized, at most {seconds(off_s)} off")
    if host.spans_nodes:
        return DoctorFinding.warning(
            "clock", "not synchronized, according to the kernel", "run an NTP client (chrony) on it"
        )
    return DoctorFinding.ok("clock", "fine for one machine (not set by NTP, which only several nodes need)")
