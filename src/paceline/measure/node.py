"""What a node is doing: its cores, memory, disks and network, by psutil. Its GPUs are looked at in `measure.nvml`.

Traffic that passes the kernel by, such as NCCL's over InfiniBand, is in no counter that is read here.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, final

from paceline.core.limits import CgroupLimits
from paceline.core.process import cpu_ticks, descendants
from paceline.measure.cores import CoreTime, build_core_time_reader, busy_share

SYS: Final = Path("/sys")
Counters = dict[str, dict[str, int]]
"""Bytes since the node was started, by rate and device."""
T = TypeVar("T")


class _NodeSample(NamedTuple):
    """What had been counted, after `at_s` seconds."""

    at_s: float
    cpu: CoreTime | None
    own_s: float
    counters: Counters


@final
class NodeSampler:
    """Look at a node, of which processes `ranks` are those of a run; a value that cannot be had is left out.

    `psutil` is that module, `now` seconds of a clock that is never set, and `sys` the kernel's tree of devices.
    """

    def __init__(
        self, psutil: Any, ranks: Sequence[int], limits: CgroupLimits, now: Callable[[], float], sys: Path = SYS
    ) -> None:
        self._psutil, self._limits, self._now, self._sys = psutil, limits, now, sys
        self._pids, self._ticks_per_s = tuple(ranks), os.sysconf("SC_CLK_TCK")
        found = (_read_or_empty(psutil.Process, pid) for pid in ranks)
        self._ranks = [rank for rank in found if rank is not None]
        numbers = sorted(
            {core for rank in self._ranks for core in _read_or_empty(lambda rank=rank: rank.cpu_affinity()) or ()}
        )
        self._cpu = build_core_time_reader(psutil, numbers, limits, now)
        self._before = self._count()

    def sample(self) -> dict[str, Any]:
        """Return what the node is doing, and what it has done since the last look.

        `cpu` is the busy share, 0 to 1, of the cores that the ranks may use, whoever is busy there; or, where a quota
        of CPU time is tighter, the share of that. `others_cpu` is what of it was neither the ranks nor processes below
        them. `read_memory_bytes`, of `memory_total_bytes`, is what can be had by
        swapping alone; of a container with a limit, its own. `ranks_memory_bytes` is what is resident of the ranks
        themselves. Their loaders' workers are not in it: most of their memory is the ranks' own, and to tell it apart
        takes the kernel longer than all the rest. Disks and network are in bytes a second, of the physical devices
        where those are known, else of all but the loopback.
        """
        before, self._before = self._before, self._count()
        after = self._before
        passed_s = after.at_s - before.at_s
        row = {
            "cpu": _busy_share(before.cpu, after.cpu),
            "others_cpu": _other_processes_share(before, after),
            **self._memory(),
        }
        if passed_s > 0:
            row |= {
                name: round(moved / passed_s) for name, moved in _bytes_moved(before.counters, after.counters).items()
            }
        return {name: value for name, value in row.items() if value is not None}

    def _count(self) -> _NodeSample:
        own_s = sum(cpu_ticks(pid) for rank in self._pids for pid in (rank, *descendants(rank))) / self._ticks_per_s
        return _NodeSample(
            self._now(),
            _read_or_empty(self._cpu),
            own_s,
            {**(_read_or_empty(self._disks) or {}), **(_read_or_empty(self._network) or {})},
        )

    def _memory(self) -> dict[str, int | None]:
        machine = _read_or_empty(self._psutil.virtual_memory)
        used_bytes, total_bytes = (machine.total - machine.available, machine.total) if machine else (None, None)
        if machine and self._limits.memory_bytes < machine.total:
            used_bytes, total_bytes = _read_or_empty(self._limits.used_memory_bytes), round(self._limits.memory_bytes)
        resident = [_read_or_empty(rank.memory_info) for rank in self._ranks]
        ranks_bytes = sum(each.rss for each in resident if each)
        return {
            "memory_bytes": used_bytes,
            "memory_total_bytes": total_bytes,
            "ranks_memory_bytes": ranks_bytes or None,
        }

    def _disks(self) -> Counters:
        disks = self._psutil.disk_io_counters(perdisk=True, nowrap=False) or {}  # nowrap would take a lock
        real = self._physical(disks, "block")
        return {
            "disk_read_bytes_per_s": {name: disks[name].read_bytes for name in real},
            "disk_written_bytes_per_s": {name: disks[name].write_bytes for name in real},
        }

    def _network(self) -> Counters:
        cards = self._psutil.net_io_counters(pernic=True, nowrap=False) or {}
        real = self._physical((name for name in cards if name not in ("lo", "lo0")), "class/net")
        return {
            "net_sent_bytes_per_s": {name: cards[name].bytes_sent for name in real},
            "net_received_bytes_per_s": {name: cards[name].bytes_recv for name in real},
        }

    def _physical(self, names: Iterable[str], folder: str) -> list[str]:
        """Return the physical devices, whose bytes a volume, bond or bridge above them counts again; else all."""
        known = list(names)
        physical = [name for name in known if (self._sys / folder / name.replace("/", "!") / "device").exists()]
        return physical or known


def _busy_share(before: CoreTime | None, after: CoreTime | None) -> float | None:
    busy = busy_share(before, after) if before and after else None
    return None if busy is None else round(busy, 4)


def _other_processes_share(before: _NodeSample, after: _NodeSample) -> float | None:
    """Return the share of the cores that was kept busy by others; None where a rank's own time is not known."""
    if before.cpu is None or after.cpu is None or not before.own_s:
        return None
    there_were_s = after.cpu.available_s - before.cpu.available_s
    others_s = after.cpu.busy_s - before.cpu.busy_s - max(0.0, after.own_s - before.own_s)
    return round(min(1.0, max(0.0, others_s / there_were_s)), 4) if there_were_s > 0 else None


def _bytes_moved(before: Counters, after: Counters) -> dict[str, int]:
    """Return the bytes of all devices; one that has come, gone or been reset in between has moved none."""
    return {
        name: sum(max(0, num_bytes - before[name].get(device, num_bytes)) for device, num_bytes in devices.items())
        for name, devices in after.items()
        if name in before and devices
    }


def _read_or_empty(read: Callable[..., T], *arguments: Any) -> T | None:
    """Return the answer to `read`, or None where it has none."""
    try:
        return read(*arguments)
    except Exception:  # a kernel that tells other facts, or none, makes psutil raise nearly anything
        return None
