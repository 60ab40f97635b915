"""What a container or a batch system lets the processes of this one use, by Linux control groups (version 2).

https://docs.kernel.org/admin-guide/cgroup-v2.html. Version 1, and other systems, set no limits that are seen here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
MOUNT: Final = Path("/sys/fs/cgroup")
INFINITY: Final = float("inf")
_NO_LIMIT: Final = (INFINITY, Path())


@dataclass(frozen=True)
class Limits:
    """The tightest limits on the group of this process and those around it; infinite where there is none.

    `memory_bytes` is set by group `memory_of`, and `cores`, CPU seconds a second, by group `cores_of`: their folders.
    """

    memory_bytes: float = INFINITY
    memory_of: Path = Path()
    cores: float = INFINITY
    cores_of: Path = Path()

    def used_memory_bytes(self) -> int:
        """Return what the group that sets the limit holds, less file pages that the kernel can drop at once."""
        droppable = _table(self.memory_of / "memory.stat").get("inactive_file", 0)
        return max(0, int((self.memory_of / "memory.current").read_text()) - droppable)

    def cpu_s(self) -> float:
        """Return the CPU seconds that the group that sets the limit has spent."""
        return _table(self.cores_of / "cpu.stat")["usage_usec"] / 1e6


def find_limits(proc: Path = PROC, mount: Path = MOUNT) -> Limits:
    """Return the limits of this process: for each kind the tightest of its group and of those that contain it."""
    groups = _groups(proc, mount)
    memory_bytes, memory_of = min(((_amounts(group / "memory.max")[0], group) for group in groups), default=_NO_LIMIT)
    cores, cores_of = min(((_cores(group), group) for group in groups), default=_NO_LIMIT)
    return Limits(memory_bytes, memory_of, cores, cores_of)


def _groups(proc: Path, mount: Path) -> list[Path]:
    """Return the folders of the group of this process and of those around it, as far as they can be seen."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    group = mount / own
    return [each for each in (group, *group.parents) if each.is_relative_to(mount)]


def _cores(group: Path) -> float:
    """Return the CPU seconds a second: `cpu.max` has microseconds, and the period in which they may be spent."""
    quota, *period = _amounts(group / "cpu.max")
    return quota / period[0] if period and period[0] > 0 else INFINITY


def _amounts(path: Path) -> list[float]:
    """Return the numbers in a file; `max`, no file, and what is no number are infinite."""
    try:
        return [INFINITY if word == "max" else float(word) for word in path.read_text().split()] or [INFINITY]
    except (OSError, ValueError):
        return [INFINITY]


def _table(path: Path) -> dict[str, int]:
    """Return a file of lines `name number`."""
    return {name: int(number) for name, number in (line.split() for line in path.read_text().splitlines())}
