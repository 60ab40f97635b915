"""Files of many samples, read at any place by many threads and processes: opened when first read, few at a time.

Nothing is mapped into memory, so that a file that is cut short while it is read is an error and no signal (SIGBUS).
No descriptor has a place of its own, so that a process that was forked may use what its parent opened. The kernel is
not told in which order samples are read: `POSIX_FADV_RANDOM` gained nothing for shuffled photographs from a cold disk,
and cost two thirds of the rate in sequence (measured, LMDB and tars of 110 kB images).
"""

import errno
import os
import resource
import stat
from collections.abc import Callable
from functools import lru_cache

MAX_SAMPLE_BYTES = 2**30
"""The most bytes a sample may have: what says more is damaged, or means harm."""
_MOST_OPEN = 256


class OpenFiles:
    """Read files of known sizes by number. All errors are `OSError`."""

    def __init__(self, paths: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        assert len(paths) == len(sizes), f"{len(paths)} paths for {len(sizes)} sizes"
        self.paths = paths
        self.sizes = sizes
        self._open = _opener()

    def read(self, number: int, start: int, length: int) -> bytes:
        """Return `length` bytes of file `number` from byte `start` on."""
        descriptor = self._open(self.paths[number], self.sizes[number])
        data = os.pread(descriptor.number, length, start)
        while len(data) < length:  # Linux gives 2 GiB at most, and a network less
            more = os.pread(descriptor.number, length - len(data), start + len(data))
            if not more:
                raise OSError(errno.EIO, f"ends before byte {start + length:,}")
            data += more
        return data

    def __getstate__(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return self.paths, self.sizes

    def __setstate__(self, state: tuple[tuple[str, ...], tuple[int, ...]]) -> None:
        self.paths, self.sizes = state
        self._open = _opener()


class OpenFile:
    """A regular file, open to be read until nobody holds it: so no thread's descriptor is closed by another one's."""

    number = -1

    def __init__(self, path: str, expected_bytes: int | None = None) -> None:
        # Without O_NONBLOCK a pipe that took a file's place would hang the run.
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self.number)
        self.num_bytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        if expected_bytes not in (None, self.num_bytes):
            raise OSError(errno.ESTALE, f"has {self.num_bytes:,} bytes, and had {expected_bytes:,} when it was listed")

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when Python ends
        if self.number >= 0:  # else it could not be opened
            close(self.number)


def _opener() -> Callable[[str, int], OpenFile]:
    """Return what opens a file, or gives the one it has opened before; a quarter of what a process may open at most."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return lru_cache(_MOST_OPEN if most == resource.RLIM_INFINITY else max(1, min(_MOST_OPEN, most // 4)))(OpenFile)
