"""What a process and its children take, by proc(5): CPU seconds, memory that cannot be dropped, bytes from the disk.

Children count as long as they run, which those of a loader do until it is closed, and their CPU time for ever. Where
there is no /proc, as outside Linux, nothing is found, and everything is 0.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.core.process import PROC, cpu_ticks, descendants, read_or_nothing


class Taken(NamedTuple):
    """CPU seconds, and bytes that were read from storage; both since the processes began."""

    cpu_s: float = 0.0
    disk_bytes: int = 0

    def since(self, before: "Taken") -> "Taken":
        """Return what was taken since `before`."""
        return Taken(self.cpu_s - before.cpu_s, self.disk_bytes - before.disk_bytes)


def taken(pid: int, proc: Path = PROC) -> Taken:
    """Return what a process and those below it have taken so far."""
    each = [pid, *descendants(pid, proc)]
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    return Taken(sum(cpu_ticks(one, proc) for one in each) * tick_s, sum(_disk_bytes(one, proc) for one in each))


def memory_bytes(pid: int, proc: Path = PROC) -> int:
    """Return the memory of a process and those below it that is not a file's: what is shared counts once."""
    return sum(_held_bytes(one, proc) for one in (pid, *descendants(pid, proc)))


def _disk_bytes(pid: int, proc: Path) -> int:
    return sum(number for name, number in _table(proc / str(pid) / "io") if name == "read_bytes")


def _held_bytes(pid: int, proc: Path) -> int:
    held = ("Pss_Anon", "Pss_Shmem")
    return 1024 * sum(number for name, number in _table(proc / str(pid) / "smaps_rollup") if name in held)


def _table(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the names and the numbers of a file of lines `Name:  number kB`."""
    for line in read_or_nothing(path).splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        if number and number[0].isdecimal():
            yield name, int(number[0])
