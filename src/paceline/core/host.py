"""CPU and memory limits that a container or a batch system sets by Linux control groups.

Supports cgroup v2, https://docs.kernel.org/admin-guide/cgroup-v2.html, and CPU quotas of v1,
https://docs.kernel.org/scheduler/sched-bwc.html. Does not import torch.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.process import PROC
from paceline.core.world import World

MOUNT: Final = Path("/sys/fs/cgroup")
INFINITY: Final = float("inf")
_NO_LIMIT: Final = (INFINITY, Path())


@dataclass(frozen=True)
class CgroupLimits:
    """The tightest limits on the control group of this process and its ancestors; infinite without a limit."""

    memory_bytes: float = INFINITY
    memory_of: Path = Path()  # directory of the group with this limit
    cores: float = INFINITY  # CPU seconds per second
    cores_of: Path = Path()

    def used_memory_bytes(self) -> int:
        """Return the memory in use by the limiting group, without page cache that the kernel can drop."""
        droppable = _read_table(self.memory_of / "memory.stat").get("inactive_file", 0)
        return max(0, int((self.memory_of / "memory.current").read_text()) - droppable)

    def cpu_s(self) -> float:
        """Return the CPU seconds used by the limiting group."""
        used = self.cores_of / "cpuacct.usage"  # version 1
        return (
            int(used.read_text()) / 1e9
            if used.exists()
            else _read_table(self.cores_of / "cpu.stat")["usage_usec"] / 1e6
        )


def find_limits(proc: Path = PROC, mount: Path = MOUNT) -> CgroupLimits:
    """Return the limits of this process."""
    groups = _cgroup_dirs(proc, mount, "")
    memory_bytes, memory_of = min(
        ((_read_amounts(group / "memory.max")[0], group) for group in groups), default=_NO_LIMIT
    )
    scheduled = [*groups, *_cgroup_dirs(proc, mount, "cpu")]
    cores, cores_of = min(((_cpu_quota(group), group) for group in scheduled), default=_NO_LIMIT)
    return CgroupLimits(memory_bytes, memory_of, cores, cores_of)


def oom_kills(proc: Path = PROC, mount: Path = MOUNT) -> int:
    """Return how many processes of this control group the kernel's OOM killer has killed; 0 if unknown.

    In the machine's own group, which has no count, return those of the machine.
    """
    files = [group / "memory.events" for group in _cgroup_dirs(proc, mount, "")[:1]]
    files += [group / "memory.oom_control" for group in _cgroup_dirs(proc, mount, "memory")[:1]]  # version 1
    files.append(proc / "vmstat")
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            return _read_table(file).get("oom_kill", 0)
    return 0


def memory_left_bytes() -> float:
    """Return the bytes that this control group may still allocate; infinite without a limit."""
    limits = find_limits()
    return limits.memory_bytes - limits.used_memory_bytes() if limits.memory_bytes < INFINITY else INFINITY


def free_memory_bytes(proc: Path = PROC) -> float:
    """Return the bytes that processes may still allocate in this control group and on this machine."""
    table = (line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    free = next(int(value.split()[0]) * 1024 for name, value in table if name == "MemAvailable")
    return min(free, memory_left_bytes())


def usable_cores(proc: Path = PROC, mount: Path = MOUNT) -> int:
    """Return how many CPU cores this process may use, by its affinity mask and CPU quota."""
    return max(1, int(min(_affinity(0), find_limits(proc, mount).cores)))


def rank_cores(world: World, proc: Path = PROC, mount: Path = MOUNT) -> int:
    """Return how many CPU cores each rank of `world` should use, in a rank or in the process that will start ranks."""
    own_cpus = launcher_cpus = _affinity(0)
    if world.launcher in ("local", "torchrun"):
        with contextlib.suppress(ProcessLookupError):  # the launcher has ended, and this process soon will
            launcher_cpus = _affinity(os.getppid())
    return share_of_cores(world, own_cpus, launcher_cpus, find_limits(proc, mount).cores)


def share_of_cores(world: World, own_cpus: int, launcher_cpus: int, quota: float) -> int:
    """Return the cores of a rank that may run on `own_cpus` CPUs, and its launcher on `launcher_cpus`.

    `quota` is in CPU seconds per second. A hardware thread counts as a core, as for the kernel and Slurm.
    """
    # Ranks bound to CPUs of their own get these. Ranks bound to the same CPUs, such as a NUMA node's, divide the
    # launcher's CPUs, which is right if ranks are spread evenly. Allocations and quotas are for all ranks of the node.
    ranks = world.local_world_size
    ranks_of_launcher = max(1, ranks // world.local_tasks)
    allocated = world.allocated_cpus or INFINITY
    return max(1, int(min(own_cpus, launcher_cpus // ranks_of_launcher, allocated / ranks, quota / ranks)))


def _affinity(process: int) -> int:
    """Return the number of CPUs that the process with id `process` may run on; 0 is this process."""
    return len(os.sched_getaffinity(process)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cgroup_dirs(proc: Path, mount: Path, controller: str) -> list[Path]:
    """Return the directories of this process's group and its ancestors; `controller` is "" for version 2."""
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


def _cpu_quota(group: Path) -> float:
    """Return the CPU quota in CPU seconds per second."""
    quota, *period = _read_amounts(group / "cpu.max")
    if not period:
        (quota, *_), period = _read_amounts(group / "cpu.cfs_quota_us"), _read_amounts(group / "cpu.cfs_period_us")
    return quota / period[0] if quota > 0 and 0 < period[0] < INFINITY else INFINITY  # without a limit it is -1


def _read_amounts(path: Path) -> list[float]:
    """Return the numbers in a file; `max`, a missing file and invalid numbers are infinite."""
    try:
        return [INFINITY if word == "max" else float(word) for word in path.read_text().split()] or [INFINITY]
    except (OSError, ValueError):
        return [INFINITY]


def _read_table(path: Path) -> dict[str, int]:
    """Read a file of lines `name number`."""
    return {name: int(number) for name, number in (line.split() for line in path.read_text().splitlines())}
