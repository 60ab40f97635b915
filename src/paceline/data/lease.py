"""Locks of files that the kernel lets go of when a process dies, however it dies: `flock`, shared or by one alone.

Unlike the record locks of `core.runlock` they can be shared, and hold between threads. A forked process has its
parent's locks too, so it never lets go of them: only the process that took one does. A file system without locks
protects nothing. The files stay empty; whoever removes one holds it alone.
"""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from paceline.core.files import open_lock_file
from paceline.core.runlock import NO_LOCKS


@dataclass
class Lease:
    """A lock on the file `path` that process `pid` has taken."""

    path: Path
    descriptor: int
    pid: int

    def becomes_alone(self) -> bool:
        """Whether this process could be made the only one to hold it. It holds nothing where it could not."""
        return _flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def becomes_shared(self) -> None:
        """Let others hold it too. Another may have had it alone, and removed the file, in between."""
        _flock(self.descriptor, fcntl.LOCK_SH)

    @property
    def stands(self) -> bool:
        """Whether the file is still the one that its path names."""
        return _is_at(self.path, self.descriptor)

    def close(self) -> None:
        """Let go of it. In a forked process, leave it to the parent."""
        if self.descriptor < 0:
            return
        if self.pid == os.getpid():
            _flock(self.descriptor, fcntl.LOCK_UN)
        os.close(self.descriptor)
        self.descriptor = -1

    def remove(self) -> None:
        """Remove the file, which this process holds alone, and let go of it."""
        self.path.unlink(missing_ok=True)
        self.close()


def take(path: Path, *, alone: bool, wait: bool) -> Lease | None:
    """Return the lock on file `path`, which is made; None where others have it and `wait` is not asked for.

    Raise `OSError` where the file cannot be made, or is a link or another user's, as in `/dev/shm`.
    """
    how = (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB)
    while True:
        descriptor = open_lock_file(path, 0o600)
        try:
            is_taken = _flock(descriptor, how)
        except BaseException:
            os.close(descriptor)
            raise
        if is_taken and _is_at(path, descriptor):
            return Lease(path, descriptor, os.getpid())
        os.close(descriptor)
        if not is_taken:
            return None


def _flock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
