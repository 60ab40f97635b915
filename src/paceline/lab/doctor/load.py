"""How much of this machine's cores other processes use now: a run would have to share with them."""

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
"""How long the cores are watched: 50 ticks of the kernel's clock on each."""


def _sleep(seconds: float) -> None:
    threading.Event().wait(seconds)


class Ticks(NamedTuple):
    """Clock ticks: what all processes used of the cores, what a hypervisor took of them, and what paceline used."""

    busy: int
    stolen: int
    own: int


def watch(here: Here, cores: Sequence[int], wait: Callable[[float], object] = _sleep) -> tuple[Ticks, float]:
    """Return what was used of `cores` in a moment, and how many ticks one core had in it.

    The ranks that `doctor --ranks` has started have the same parent, and are no other processes.
    """
    before, began_s = _ticks(here, cores), here.now()
    wait(_LOOK_S)
    after, ended_s = _ticks(here, cores), here.now()
    passed = Ticks(*(late - early for early, late in zip(before, after, strict=True)))
    return passed, ((ended_s - began_s) or _LOOK_S) * os.sysconf("SC_CLK_TCK")


def load_finding(here: Here, wait: Callable[[float], object] = _sleep) -> Finding:
    """Return how many of the cores that a run may use are kept busy by others, and which share of them that is."""
    cores = sorted(os.sched_getaffinity(0))
    if not here.text("proc/stat"):
        return Finding.ok("load", "not told by the kernel")
    passed, core = watch(here, cores, wait)
    others = max(0, passed.busy - passed.own + passed.stolen) / core
    held = min(1.0, others / len(cores))
    found = f"other processes keep {others:.1f} of {len(cores)} cores busy ({share(held)})"
    waiting = here.text("proc/loadavg").split()[:1]
    if waiting:
        found += f", load average {waiting[0]}"
    if held < LOST_CPU_SHARE:
        return Finding.ok("load", found)
    hypervisor = ", or move off a shared virtual machine" if passed.stolen > passed.busy - passed.own else ""
    return Finding.look("load", found, f"end them before anything is measured: a run shares the cores{hypervisor}")


def _ticks(here: Here, cores: Sequence[int]) -> Ticks:
    proc = here.root / "proc"
    top = os.getpid() if here.world.local_world_size == 1 else os.getppid()
    own = sum(cpu_ticks(pid, proc) for pid in {os.getpid(), top, *descendants(top, proc)})
    return Ticks(*core_ticks(cores, proc), own)
