"""One writer a run directory: a lock that the kernel lets go of when its process dies, however it dies.

It is a POSIX record lock, not `flock`: a process that is forked, such as the worker of a loader, does not hold it,
and it works over NFS. A file system without locks protects nothing. It does not stop readers.
"""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from paceline.core.errors import RecipeError

LOCK: Final = ".lock"
NO_LOCKS: Final = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""What a file system without locks says."""


@contextlib.contextmanager
def locked(folder: Path, launcher_pid: int = 0) -> Iterator[None]:
    """Hold the lock of `folder`, which is made; `launcher_pid` started this process (0: nobody did).

    A folder that afterwards holds nothing else is left as it was found. Raise `RecipeError` when another process has
    the lock, naming its number, its host and its launcher's, and when the folder cannot be made or written to.
    """
    is_new = not folder.exists()
    descriptor = _acquire(folder)
    try:
        who = {"pid": os.getpid(), "host": os.uname().nodename, "launcher_pid": launcher_pid}
        with contextlib.suppress(OSError):  # on a full disk the holder stays without a name
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(who).encode(), 0)
        yield
    finally:
        _release(folder, descriptor, is_new=is_new)


def _acquire(folder: Path) -> int:
    """Return the descriptor of the locked file. The file may be removed just before it is locked: then once more."""
    path = folder / LOCK
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            reason = error.strerror
            raise RecipeError(f"--run-dir: {folder} cannot be written to: {reason} (name another)") from None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                holder = _holder(descriptor)
                os.close(descriptor)
                raise RecipeError(f"--run-dir: {folder} is in use by {holder}, or name another)") from None
        if _is_at(path, descriptor):
            return descriptor
        os.close(descriptor)


def _release(folder: Path, descriptor: int, *, is_new: bool) -> None:
    with contextlib.suppress(OSError):
        if [each.name for each in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            if is_new:
                folder.rmdir()
    os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    """Return who has the lock, and what to do about it."""
    try:
        who = json.loads(os.pread(descriptor, 1000, 0))
        pid, host, launcher = int(who["pid"]), str(who["host"]), int(who["launcher_pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return "another process (wait for it"
    started = f", started by {launcher}" if launcher else ""
    return f"process {pid} on {host}{started} (wait for it, stop it with `kill {launcher or pid}`"
