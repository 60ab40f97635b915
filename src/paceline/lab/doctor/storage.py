"""Check that the run directory is writable, its free space, and the speed of its disk. Leaves no files."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from paceline.core.units import size
from paceline.data.sources.places import printable
from paceline.lab.doctor.finding import Finding
from paceline.lab.doctor.here import Here, reason
from paceline.lab.doctor.patience import answer

_LITTLE_DISK: Final = 5 * 10**9
_SLOW_BYTES_PER_S: Final = 20e6
"""Slower than a laptop's hard disk: saving a ResNet-50 with momentum, 205 MB, would take ten seconds."""
_BLOCK: Final = 4 * 2**20
_BLOCKS: Final = 8
_LONG_S: Final = 0.4
"""Longest time for writing or reading; extrapolated from a first block."""
_WAIT_S: Final = 10.0
"""Timeout for disks that may hang: 4 MiB in this time is too slow for any run."""


class Speed(NamedTuple):
    """Bytes per second of one large file, written to the disk and read from it."""

    written: float
    read: float


def storage_findings(host: Here) -> Iterator[Finding]:
    """Yield whether the run directory is writable, tested once per node, and on rank 0 its speed."""
    # All nodes share the run directory: if all timed it at once, each would see a fraction of its speed.
    folder = printable(host.folder)
    try:
        total, free, speed = answer(lambda: _look(host), _WAIT_S)
    except OSError as error:
        found = f"{folder} cannot be written to: {reason(error)}"
        yield Finding.wrong("disk", found, "make it writable, or name another folder with --run-dir")
        return
    found = f"{size(free)} free at {folder}"
    if total > 0 and free < _LITTLE_DISK:  # some network file systems report 0 of 0
        yield Finding.look("disk", found, "free some, or name another folder with --run-dir")
    else:
        yield Finding.ok("disk", found)
    if speed is not None:
        yield _judged(speed)


def _look(host: Here) -> tuple[int, int, Speed | None]:
    """Return the bytes of a disk, its free bytes, and its speed; of the closest existing parent folder."""
    folder = host.folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    speed = None
    if host.world.is_main:
        speed = try_disk(existing, host.now)
    elif host.world.is_node_main:
        tempfile.TemporaryFile(prefix=".paceline-", dir=existing).close()
    usage = shutil.disk_usage(existing)
    return usage.total, usage.free, speed


def _judged(speed: Speed) -> Finding:
    found = f"writes {size(speed.written)}/s, reads {size(speed.read)}/s"
    if speed.written < _SLOW_BYTES_PER_S:
        advice = "name a folder on a faster disk with --run-dir, or save less often (checkpoint.every)"
        return Finding.look("disk speed", found, advice)
    return Finding.ok("disk speed", found)


def try_disk(folder: Path, now: Callable[[], float]) -> Speed:
    """Measure how fast `folder` writes and reads up to 32 MiB, in under a second unless 4 MiB take longer.

    `now` returns seconds. Raise `OSError` if it is not writable.
    """
    # Random, as some disks compress. The file has no name, so it vanishes even if this process is killed.
    block = os.urandom(_BLOCK)
    with tempfile.TemporaryFile(prefix=".paceline-", dir=folder) as file:
        number = file.fileno()
        written = _rate(lambda blocks: _write(number, block, blocks), now)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache would be read
        os.lseek(number, 0, os.SEEK_SET)
        num_blocks = os.fstat(number).st_size // _BLOCK
        return Speed(written, _rate(lambda blocks: _read(number, blocks), now, num_blocks))


def _rate(move: Callable[[int], None], now: Callable[[], float], blocks: int = _BLOCKS) -> float:
    """Return bytes per second of a first block, or of the following ones if they are fast enough."""
    first_s = _seconds(move, 1, now)
    more = blocks - 1
    if not more or first_s * more > _LONG_S:
        return _BLOCK / first_s
    return more * _BLOCK / _seconds(move, more, now)


def _seconds(move: Callable[[int], None], blocks: int, now: Callable[[], float]) -> float:
    start_s = now()
    move(blocks)
    return max(1e-9, now() - start_s)


def _write(number: int, block: bytes, blocks: int) -> None:
    for _ in range(blocks):
        left = memoryview(block)
        while left:
            left = left[os.write(number, left) :]
    os.fsync(number)


def _read(number: int, blocks: int) -> None:
    for _ in range(blocks):
        os.read(number, _BLOCK)
