"""Resource usage of a process tree, from proc(5): CPU seconds, private memory, bytes read from disk.

Children count while they run, and their CPU time also afterwards. Without /proc, as outside of Linux, everything is 0.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.core.process import PROC, cpu_ticks, descendants, read_text_or_empty


class ResourceUsage(NamedTuple):
    """CPU seconds, and bytes read from storage, since the processes started."""

    cpu_s: float = 0.0
    disk_bytes: int = 0

    def subtract(self, before: "ResourceUsage") -> "ResourceUsage":
        """Return the usage since `before`."""
        return ResourceUsage(self.cpu_s - before.cpu_s, self.disk_bytes - before.disk_bytes)


def read_usage(pid: int, proc: Path = PROC) -> ResourceUsage:
    """Return the usage of a process and its descendants so far."""
    pids = [pid, *descendants(pid, proc)]
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    return ResourceUsage(
        sum(cpu_ticks(one, proc) for one in pids) * tick_s, sum(_read_disk_bytes(one, proc) for one in pids)
    )


def read_memory_bytes(pid: int, proc: Path = PROC) -> int:
    """Return the memory of a process and its descendants without file pages; shared memory counts once."""
    return sum(_read_private_bytes(one, proc) for one in (pid, *descendants(pid, proc)))


def _read_disk_bytes(pid: int, proc: Path) -> int:
    return sum(number for name, number in _parse_proc_table(proc / str(pid) / "io") if name == "read_bytes")


def _read_private_bytes(pid: int, proc: Path) -> int:
    fields = ("Pss_Anon", "Pss_Shmem")
    return 1024 * sum(number for name, number in _parse_proc_table(proc / str(pid) / "smaps_rollup") if name in fields)


def _parse_proc_table(path: Path) -> Iterator[tuple[str, int]]:
    """Yield names and numbers of a file with lines `Name:  number kB`."""
    for line in read_text_or_empty(path).splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        if number and number[0].isdecimal():
            yield name, int(number[0])
