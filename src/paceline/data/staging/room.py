"""Whether a folder has room for a copy. What lies in memory counts against memory, not only against the folder."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.errors import DataError
from paceline.core.units import count, size
from paceline.data.sources.places import printable
from paceline.data.staging.inventory import Stock

PROC: Final = Path("/proc")
_IN_MEMORY: Final = {"tmpfs", "ramfs"}
_KEPT_SHARE: Final = 0.1
"""Of the memory that is left, what a copy may not take: the run itself needs some."""


@dataclass(frozen=True)
class Room:
    """Bytes that may be written to a folder, why not more, and how many files."""

    num_bytes: float
    limit: str
    num_files: float


def room_in(folder: Path, memory_left: Callable[[], float], proc: Path = PROC) -> Room:
    """Return the room in `folder`; `memory_left` gives the bytes that the control group of this process may still use.

    In a folder that is held in memory, nine tenths of the memory that is free are the most.
    """
    status = os.statvfs(folder)
    free = Room(status.f_bavail * status.f_frsize, "free there", status.f_favail or math.inf)
    if not is_in_memory(folder, proc):
        return free
    limits = ((_available(proc), "of memory are free"), (memory_left(), "of memory are left to this job"))
    memory = [
        Room(num_bytes * (1 - _KEPT_SHARE), f"{limit}, less a tenth", free.num_files) for num_bytes, limit in limits
    ]
    return min((free, *memory), key=lambda room: room.num_bytes)


def check_room(stock: Stock, room: Room, folder: Path, title: str) -> None:
    """Raise `DataError` where what is still to be copied, `stock`, does not fit in `folder`."""
    place = f"data.stage: {printable(folder)} has no room for {title}"
    fix = "(free some, name another folder, or set data.stage=off)"
    if stock.room_bytes > room.num_bytes:
        raise DataError(f"{place}: {size(stock.room_bytes)} are needed, {size(room.num_bytes)} {room.limit} {fix}")
    if stock.num_files > room.num_files:
        raise DataError(f"{place}: {count(stock.num_files, 'file')}, {room.num_files:,.0f} more may be made {fix}")


def is_in_memory(folder: Path, proc: Path = PROC) -> bool:
    """Whether the file system that `folder` is on is held in memory (`man 5 proc_pid_mountinfo`)."""
    device = os.stat(folder).st_dev  # noqa: PTH116 - beside os.major
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = (proc / "self" / "mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    mounts = [line.split() for line in lines]
    return any(words[2] == number and words[words.index("-") + 1] in _IN_MEMORY for words in mounts)


def _available(proc: Path) -> float:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(found) * 1024 if found else math.inf
