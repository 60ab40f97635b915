"""What a container or a batch system lets this process and those beside it use, by Linux control groups. Torch-free.

Version 2, https://docs.kernel.org/admin-guide/cgroup-v2.html, and of version 1 the quota of CPU time,
https://docs.kernel.org/scheduler/sched-bwc.html. Other systems set no limits that are seen here.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.world import World

PROC: Final = Path("/proc")
MOUNT: Final = Path("/sys/fs/cgroup")
INFINITY: Final = float("inf")
_NO_LIMIT: Final = (INFINITY, Path())


@dataclass(frozen=True)
class CgroupLimits:
    """The tightest limits on the group of this process and those around it; infinite where there is none.

    `read_memory_bytes` is set by group `memory_of`, and `cores`, CPU seconds a second, by group `cores_of`: their
    folders.
    """

    memory_bytes: float = INFINITY
    memory_of: Path = Path()
    cores: float = INFINITY
    cores_of: Path = Path()

    def used_memory_bytes(self) -> int:
        """Return what the group that sets the limit holds, less file pages that the kernel can drop at once."""
        droppable = _read_table(self.memory_of / "memory.stat").get("inactive_file", 0)
        return max(0, int((self.memory_of / "memory.current").read_text()) - droppable)

    def cpu_s(self) -> float:
        """Return the CPU seconds that the group that sets the limit has spent."""
        used = self.cores_of / "cpuacct.usage"  # version 1
        return (
            int(used.read_text()) / 1e9
            if used.exists()
            else _read_table(self.cores_of / "cpu.stat")["usage_usec"] / 1e6
        )


def find_limits(proc: Path = PROC, mount: Path = MOUNT) -> CgroupLimits:
    """Return the limits of this process: for each kind the tightest of its group and of those that contain it."""
    groups = _groups(proc, mount, "")
    memory_bytes, memory_of = min(
        ((_read_amounts(group / "memory.max")[0], group) for group in groups), default=_NO_LIMIT
    )
    scheduled = [*groups, *_groups(proc, mount, "cpu")]
    cores, cores_of = min(((_cores(group), group) for group in scheduled), default=_NO_LIMIT)
    return CgroupLimits(memory_bytes, memory_of, cores, cores_of)


def oom_kills(proc: Path = PROC, mount: Path = MOUNT) -> int:
    """Return how many processes the kernel has ended for want of memory in the control group of this process.

    It is 0 where that cannot be seen: without a group of its own, or on a kernel that does not count.
    """
    files = [group / "memory.events" for group in _groups(proc, mount, "")[:1]]
    files += [group / "memory.oom_control" for group in _groups(proc, mount, "memory")[:1]]  # version 1
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            return _read_table(file).get("oom_kill", 0)
    return 0


def memory_left_bytes() -> float:
    """Return the bytes that the control group of this process may still use; infinite where nothing limits it."""
    limits = find_limits()
    return limits.memory_bytes - limits.used_memory_bytes() if limits.memory_bytes < INFINITY else INFINITY


def usable_cores(proc: Path = PROC, mount: Path = MOUNT) -> int:
    """Return how many CPU cores this process may keep busy: those it may run on, or its quota where that is less."""
    return max(1, int(min(_affinity(0), find_limits(proc, mount).cores)))


def rank_cores(world: World, proc: Path = PROC, mount: Path = MOUNT) -> int:
    """Return how many CPU cores a rank of `world` is to keep busy: this process is one, or is to start them."""
    own = launchers = _affinity(0)
    if world.launcher in ("local", "torchrun"):
        with contextlib.suppress(ProcessLookupError):  # it has ended, and so will this one
            launchers = _affinity(os.getppid())
    return share_of_cores(world, own, launchers, find_limits(proc, mount).cores)


def share_of_cores(world: World, own: int, launchers: int, quota: float) -> int:
    """Return how many cores are a rank's that may run on `own` CPUs, as its launcher may on `launchers`.

    It is the least of what it may run on itself, and of its shares of what it has with others: its launcher's CPUs with
    all that were started together, and the CPUs that a batch system or a `quota`, in CPU seconds a second, gives to the
    node's ranks, with all of them. So a rank that is bound to CPUs of its own has these, and ranks that are bound to
    the same ones, such as those of a NUMA node, share them, where they are spread evenly. A hardware thread counts as a
    core, as it does for the kernel and in what Slurm gives.
    """
    ranks = world.local_world_size
    started_together = max(1, ranks // world.local_tasks)
    given = world.given_cpus or INFINITY
    return max(1, int(min(own, launchers // started_together, given / ranks, quota / ranks)))


def _affinity(process: int) -> int:
    """Return the number of CPUs that `process` may run on; 0 is this one."""
    return len(os.sched_getaffinity(process)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _groups(proc: Path, mount: Path, controller: str) -> list[Path]:
    """Return the folders of the group of this process and of those around it, as far as they can be seen.

    A `controller` has groups of its own in version 1; without one it is version 2.
    """
    try:
        lines = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except OSError:
        return []
    found = next((line for line in lines if len(line) == 3 and controller in line[1].split(",")), None)
    if found is None:
        return [mount] if not controller else []
    top = mount / found[1]
    group = top / found[2].removeprefix("/")
    return [each for each in (group, *group.parents) if each.is_relative_to(top)]


def _cores(group: Path) -> float:
    """Return the CPU seconds a second: microseconds that may be spent, in a period of so many."""
    quota, *period = _read_amounts(group / "cpu.max")
    if not period:
        (quota, *_), period = _read_amounts(group / "cpu.cfs_quota_us"), _read_amounts(group / "cpu.cfs_period_us")
    return quota / period[0] if quota > 0 and 0 < period[0] < INFINITY else INFINITY  # without a limit it is -1


def _read_amounts(path: Path) -> list[float]:
    """Return the numbers in a file; `max`, no file, and what is no number are infinite."""
    try:
        return [INFINITY if word == "max" else float(word) for word in path.read_text().split()] or [INFINITY]
    except (OSError, ValueError):
        return [INFINITY]


def _read_table(path: Path) -> dict[str, int]:
    """Return a file of lines `name number`."""
    return {name: int(number) for name, number in (line.split() for line in path.read_text().splitlines())}
