"""Check the free space of a folder; a folder in memory also counts against the memory limit."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.errors import DataError
from paceline.core.units import count, size
from paceline.data.files import printable
from paceline.data.staging.inventory import CopySize

PROC: Final = Path("/proc")
_MEMORY_FILESYSTEMS: Final = {"tmpfs", "ramfs"}
# Fraction of free memory that a copy must leave to the run.
_RESERVED_FRACTION: Final = 0.1


@dataclass(frozen=True)
class FreeSpace:
    """Free space of a folder; `limit` says in a message what limits it."""

    num_bytes: float
    limit: str
    num_files: float  # that can be created


def measure_free_space(folder: Path, memory_left: Callable[[], float], proc: Path = PROC) -> FreeSpace:
    """Return the free space of `folder`, at most nine tenths of the free memory for a folder in memory.

    `memory_left` returns the bytes left in the process's control group.
    """
    status = os.statvfs(folder)
    free = FreeSpace(status.f_bavail * status.f_frsize, "free there", status.f_favail or math.inf)
    if not is_in_memory(folder, proc):
        return free
    limits = ((_read_available_memory(proc), "of memory are free"), (memory_left(), "of memory are left to this job"))
    memory = [
        FreeSpace(num_bytes * (1 - _RESERVED_FRACTION), f"{limit}, less a tenth", free.num_files)
        for num_bytes, limit in limits
    ]
    return min((free, *memory), key=lambda space: space.num_bytes)


def check_free_space(needed: CopySize, free: FreeSpace, folder: Path, title: str) -> None:
    """Raise `DataError` if the files `needed` do not fit into `folder`."""
    prefix = f"data.stage: {printable(folder)} does not have enough space for {title}"
    fix = "(free some, choose another folder, or set data.stage=off)"
    if needed.disk_bytes > free.num_bytes:
        raise DataError(f"{prefix}: {size(needed.disk_bytes)} are needed, {size(free.num_bytes)} {free.limit} {fix}")
    if needed.num_files > free.num_files:
        raise DataError(f"{prefix}: {count(needed.num_files, 'file')}, {free.num_files:,.0f} more can be created {fix}")


def is_in_memory(folder: Path, proc: Path = PROC) -> bool:
    """Return whether the file system of `folder` is in memory (`man 5 proc_pid_mountinfo`)."""
    device = os.stat(folder).st_dev  # noqa: PTH116 - beside os.major
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = (proc / "self" / "mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    mounts = [line.split() for line in lines]
    return any(fields[2] == number and fields[fields.index("-") + 1] in _MEMORY_FILESYSTEMS for fields in mounts)


def _read_available_memory(proc: Path) -> float:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(kib) * 1024 if kib else math.inf
