"""Check how busy other processes keep the cores of this machine."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from paceline.core.process import cpu_ticks, descendants
from paceline.core.units import share
from paceline.lab.doctor.finding import DoctorFinding
from paceline.lab.doctor.here import HostContext
from paceline.measure.contention import core_ticks
from paceline.measure.verdict import LOST_CPU_SHARE

_SAMPLE_S: Final = 0.5
"""Sampling time of the cores: 50 clock ticks each."""


def _sleep(seconds: float) -> None:
    threading.Event().wait(seconds)


class CpuTicks(NamedTuple):
    """Clock ticks of the cores: used by all processes, stolen by a hypervisor, and used by paceline."""

    busy: int
    stolen: int
    own: int


def sample_ticks(
    host: HostContext, cores: Sequence[int], wait: Callable[[float], object] = _sleep
) -> tuple[CpuTicks, float]:
    """Return the ticks used of `cores` during a sample, and the ticks per core in it."""
    # Ranks that `doctor --ranks` started have the same parent and do not count as other processes.
    before, start_s = _read_ticks(host, cores), host.now()
    wait(_SAMPLE_S)
    after, end_s = _read_ticks(host, cores), host.now()
    passed = CpuTicks(*(after_ticks - before_ticks for before_ticks, after_ticks in zip(before, after, strict=True)))
    return passed, ((end_s - start_s) or _SAMPLE_S) * os.sysconf("SC_CLK_TCK")


def check_load(host: HostContext, wait: Callable[[float], object] = _sleep) -> DoctorFinding:
    """Return how many of the usable cores other processes keep busy."""
    cores = sorted(os.sched_getaffinity(0))
    if not host.read_text("proc/stat"):
        return DoctorFinding.ok("load", "not reported by the kernel")
    passed, ticks_per_core = sample_ticks(host, cores, wait)
    others = max(0, passed.busy - passed.own + passed.stolen) / ticks_per_core
    busy_share = min(1.0, others / len(cores))
    found = f"other processes keep {others:.1f} of {len(cores)} cores busy ({share(busy_share)})"
    load_average = host.read_text("proc/loadavg").split()[:1]
    if load_average:
        found += f", load average {load_average[0]}"
    if busy_share < LOST_CPU_SHARE:
        return DoctorFinding.ok("load", found)
    hypervisor = ", or move off a shared virtual machine" if passed.stolen > passed.busy - passed.own else ""
    return DoctorFinding.warning("load", found, f"stop them before measuring: a run would share the cores{hypervisor}")


def _read_ticks(host: HostContext, cores: Sequence[int]) -> CpuTicks:
    proc = host.root / "proc"
    top = os.getpid() if host.world.local_world_size == 1 else os.getppid()
    own = sum(cpu_ticks(pid, proc) for pid in {os.getpid(), top, *descendants(top, proc)})
    return CpuTicks(*core_ticks(cores, proc), own)
