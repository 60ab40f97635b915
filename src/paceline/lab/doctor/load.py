"""Check how busy other processes keep the cores of this machine."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from paceline.core.process import cpu_ticks, descendants
from paceline.core.units import share
from paceline.lab.doctor.finding import Finding
from paceline.lab.doctor.here import Here
from paceline.measure.contention import core_ticks
from paceline.measure.verdict import LOST_CPU_SHARE

_LOOK_S: Final = 0.5
"""Sampling time of the cores: 50 clock ticks each."""


def _sleep(seconds: float) -> None:
    threading.Event().wait(seconds)


class Ticks(NamedTuple):
    """Clock ticks of the cores: used by all processes, stolen by a hypervisor, and used by paceline."""

    busy: int
    stolen: int
    own: int


def watch(host: Here, cores: Sequence[int], wait: Callable[[float], object] = _sleep) -> tuple[Ticks, float]:
    """Return the ticks used of `cores` during a sample, and the ticks per core in it."""
    # Ranks that `doctor --ranks` started have the same parent and do not count as other processes.
    before, start_s = _ticks(host, cores), host.now()
    wait(_LOOK_S)
    after, end_s = _ticks(host, cores), host.now()
    passed = Ticks(*(after_ticks - before_ticks for before_ticks, after_ticks in zip(before, after, strict=True)))
    return passed, ((end_s - start_s) or _LOOK_S) * os.sysconf("SC_CLK_TCK")


def load_finding(host: Here, wait: Callable[[float], object] = _sleep) -> Finding:
    """Return how many of the usable cores other processes keep busy."""
    cores = sorted(os.sched_getaffinity(0))
    if not host.text("proc/stat"):
        return Finding.ok("load", "not reported by the kernel")
    passed, ticks_per_core = watch(host, cores, wait)
    others = max(0, passed.busy - passed.own + passed.stolen) / ticks_per_core
    busy_share = min(1.0, others / len(cores))
    found = f"other processes keep {others:.1f} of {len(cores)} cores busy ({share(busy_share)})"
    load_average = host.text("proc/loadavg").split()[:1]
    if load_average:
        found += f", load average {load_average[0]}"
    if busy_share < LOST_CPU_SHARE:
        return Finding.ok("load", found)
    hypervisor = ", or move off a shared virtual machine" if passed.stolen > passed.busy - passed.own else ""
    return Finding.look("load", found, f"stop them before measuring: a run would share the cores{hypervisor}")


def _ticks(host: Here, cores: Sequence[int]) -> Ticks:
    proc = host.root / "proc"
    top = os.getpid() if host.world.local_world_size == 1 else os.getppid()
    own = sum(cpu_ticks(pid, proc) for pid in {os.getpid(), top, *descendants(top, proc)})
    return Ticks(*core_ticks(cores, proc), own)
