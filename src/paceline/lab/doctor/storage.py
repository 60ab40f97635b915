"""Whether a run can write its folder, how much room is there, and how fast it is. Nothing stays in it."""

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
"""Slower than a laptop's hard disk: a ResNet-50 with momentum, 205 MB, would take ten seconds to save."""
_BLOCK: Final = 4 * 2**20
_BLOCKS: Final = 8
_LONG_S: Final = 0.4
"""What writing or reading may take; a first block says how long all would."""
_WAIT_S: Final = 10.0
"""For a disk that may not answer at all: 4 MiB in that time is slower than any that a run should write to."""


class Speed(NamedTuple):
    """Bytes a second of one large file, written until it is on the disk, and read from there."""

    written: float
    read: float


def storage_findings(here: Here) -> Iterator[Finding]:
    """Yield whether a run can write to its folder, as the first process of each node tries; and on rank 0, how fast.

    The folder of a run is one for all nodes: were it timed by all at once, each would have a share of its speed.
    """
    folder = printable(here.folder)
    try:
        total, free, speed = answer(lambda: _look(here), _WAIT_S)
    except OSError as error:
        found = f"{folder} cannot be written to: {reason(error)}"
        yield Finding.wrong("disk", found, "make it writable, or name another folder with --run-dir")
        return
    found = f"{size(free)} free at {folder}"
    if total > 0 and free < _LITTLE_DISK:  # some network file systems say 0 of 0
        yield Finding.look("disk", found, "free some, or name another folder with --run-dir")
    else:
        yield Finding.ok("disk", found)
    if speed is not None:
        yield _judged(speed)


def _look(here: Here) -> tuple[int, int, Speed | None]:
    """Return the bytes that a disk has, those that are free, and its speed; of the folder above one not there yet."""
    folder = here.folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    speed = None
    if here.world.is_main:
        speed = try_disk(there, here.now)
    elif here.world.is_node_main:
        tempfile.TemporaryFile(prefix=".paceline-", dir=there).close()
    usage = shutil.disk_usage(there)
    return usage.total, usage.free, speed


def _judged(speed: Speed) -> Finding:
    found = f"writes {size(speed.written)}/s, reads {size(speed.read)}/s"
    if speed.written < _SLOW_BYTES_PER_S:
        advice = "name a folder on a faster disk with --run-dir, or save less often (checkpoint.every)"
        return Finding.look("disk speed", found, advice)
    return Finding.ok("disk speed", found)


def try_disk(folder: Path, now: Callable[[], float]) -> Speed:
    """Return how fast `folder` takes and gives up to 32 MiB, in under a second unless 4 MiB alone take longer.

    `now` gives seconds. Raise `OSError` where it cannot be written to. What is written is random, for some disks
    compress, and has no name, or none any more, so that it goes even when this process is killed.
    """
    block = os.urandom(_BLOCK)
    with tempfile.TemporaryFile(prefix=".paceline-", dir=folder) as file:
        number = file.fileno()
        written = _rate(lambda blocks: _write(number, block, blocks), now)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)  # else memory is what is read
        os.lseek(number, 0, os.SEEK_SET)
        there = os.fstat(number).st_size // _BLOCK
        return Speed(written, _rate(lambda blocks: _read(number, blocks), now, there))


def _rate(move: Callable[[int], None], now: Callable[[], float], blocks: int = _BLOCKS) -> float:
    """Return bytes a second of a first block, or of those after it where all take no longer than they may."""
    first_s = _seconds(move, 1, now)
    more = blocks - 1
    if not more or first_s * more > _LONG_S:
        return _BLOCK / first_s
    return more * _BLOCK / _seconds(move, more, now)


def _seconds(move: Callable[[int], None], blocks: int, now: Callable[[], float]) -> float:
    began_s = now()
    move(blocks)
    return max(1e-9, now() - began_s)


def _write(number: int, block: bytes, blocks: int) -> None:
    for _ in range(blocks):
        left = memoryview(block)
        while left:
            left = left[os.write(number, left) :]
    os.fsync(number)


def _read(number: int, blocks: int) -> None:
    for _ in range(blocks):
        os.read(number, _BLOCK)
