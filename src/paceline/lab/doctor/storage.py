"""Check that the run directory is writable, its free space, and the speed of its disk."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from paceline.core.units import size
from paceline.data.files import printable
from paceline.lab.doctor.check import DoctorFinding, HostContext, call_with_timeout, format_os_error

_LOW_DISK_BYTES: Final = 5 * 10**9
_SLOW_BYTES_PER_S: Final = 20e6
"""Slower than a laptop's hard disk: saving a ResNet-50 with momentum, 205 MB, would take ten seconds."""
_BLOCK_BYTES: Final = 4 * 2**20
_NUM_BLOCKS: Final = 8
_MAX_TRANSFER_S: Final = 0.4
"""Longest time for writing or reading; extrapolated from a first block."""
_DISK_TIMEOUT_S: Final = 10.0
"""Timeout for disks that may hang: 4 MiB in this time is too slow for any run."""


class DiskSpeed(NamedTuple):
    """Bytes per second of one large file, written to the disk and read from it."""

    write_bytes_per_s: float
    read_bytes_per_s: float


def check_storage(host: HostContext) -> Iterator[DoctorFinding]:
    """Check that the run directory is writable, once per node, and on rank 0 its speed."""
    # All nodes share the run directory: if all timed it at once, each would see a fraction of its speed.
    folder = printable(host.folder)
    try:
        total, free, speed = call_with_timeout(lambda: _probe_folder(host), _DISK_TIMEOUT_S)
    except OSError as error:
        found = f"{folder} cannot be written to: {format_os_error(error)}"
        yield DoctorFinding.problem("disk", found, "make it writable, or name another folder with --run-dir")
        return
    found = f"{size(free)} free at {folder}"
    if total > 0 and free < _LOW_DISK_BYTES:  # some network file systems report 0 of 0
        yield DoctorFinding.warning("disk", found, "free some, or name another folder with --run-dir")
    else:
        yield DoctorFinding.ok("disk", found)
    if speed is not None:
        yield _rate_disk_speed(speed)


def _probe_folder(host: HostContext) -> tuple[int, int, DiskSpeed | None]:
    folder = host.folder.absolute()
    # The run directory may not exist yet, so probe the closest existing parent.
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    speed = None
    if host.world.is_main:
        speed = measure_disk_speed(existing, host.now)
    elif host.world.is_node_main:
        tempfile.TemporaryFile(prefix=".paceline-", dir=existing).close()
    usage = shutil.disk_usage(existing)
    return usage.total, usage.free, speed


def _rate_disk_speed(speed: DiskSpeed) -> DoctorFinding:
    found = f"writes {size(speed.write_bytes_per_s)}/s, reads {size(speed.read_bytes_per_s)}/s"
    if speed.write_bytes_per_s < _SLOW_BYTES_PER_S:
        advice = "name a folder on a faster disk with --run-dir, or save less often (checkpoint.every)"
        return DoctorFinding.warning("disk speed", found, advice)
    return DoctorFinding.ok("disk speed", found)


def measure_disk_speed(folder: Path, now: Callable[[], float]) -> DiskSpeed:
    """Measure how fast `folder` writes and reads up to 32 MiB, in under a second unless 4 MiB take longer.

    `now` returns seconds. Raise `OSError` if it is not writable.
    """
    # Random, as some disks compress. The file has no name, so it vanishes even if this process is killed.
    block = os.urandom(_BLOCK_BYTES)
    with tempfile.TemporaryFile(prefix=".paceline-", dir=folder) as file:
        number = file.fileno()
        written = _compute_bytes_per_s(lambda blocks: _write_blocks(number, block, blocks), now)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache would be read
        os.lseek(number, 0, os.SEEK_SET)
        num_blocks = os.fstat(number).st_size // _BLOCK_BYTES
        return DiskSpeed(written, _compute_bytes_per_s(lambda blocks: _read_blocks(number, blocks), now, num_blocks))


def _compute_bytes_per_s(move: Callable[[int], None], now: Callable[[], float], blocks: int = _NUM_BLOCKS) -> float:
    # A slow disk is measured by the first block alone.
    first_s = _time_blocks(move, 1, now)
    more = blocks - 1
    if not more or first_s * more > _MAX_TRANSFER_S:
        return _BLOCK_BYTES / first_s
    return more * _BLOCK_BYTES / _time_blocks(move, more, now)


def _time_blocks(move: Callable[[int], None], blocks: int, now: Callable[[], float]) -> float:
    start_s = now()
    move(blocks)
    return max(1e-9, now() - start_s)


def _write_blocks(number: int, block: bytes, blocks: int) -> None:
    for _ in range(blocks):
        left = memoryview(block)
        while left:
            left = left[os.write(number, left) :]
    os.fsync(number)


def _read_blocks(number: int, blocks: int) -> None:
    for _ in range(blocks):
        os.read(number, _BLOCK_BYTES)
