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
from typing import Any, Final

from paceline.core.errors import RecipeError
from paceline.core.files import open_lock_file, remove_abandoned
from paceline.core.json_file import parse_json

LOCK: Final = ".lock"
NO_LOCKS: Final = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""What a file system without locks says."""


@contextlib.contextmanager
def run_lock(
    folder: Path, launcher_pid: int = 0, *, started_s: float = 0.0, launch: str = "", resume: bool = False
) -> Iterator[float]:
    """Hold the lock of `folder`, which is made; `launcher_pid` started this process (0: nobody did).

    Yield when the run was first started, in seconds since 1970. That is `started_s`, when this process was, or an
    earlier time: each holder leaves its own in the file for the next one, which uses it when it is to `resume` or is of
    the same `launch` (not empty). So the time of processes that were killed before their first step is known.

    A folder that afterwards holds nothing else is left as it was found. Raise `RecipeError` when another process has
    the lock, naming its number, its host and its launcher's, and when the folder cannot be made or written to.
    """
    is_new = not folder.exists()
    descriptor = _acquire(folder)
    try:
        before = _read_owner(descriptor)
        if (resume or launch == before.get("launch") != "") and isinstance(first_s := before.get("first_s"), float):
            started_s = min(started_s, first_s)
        who = {"pid": os.getpid(), "host": os.uname().nodename, "launcher_pid": launcher_pid}
        who |= {"first_s": started_s, "launch": launch}
        with contextlib.suppress(OSError):  # on a full disk the holder stays without a name
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(who).encode(), 0)
        with contextlib.suppress(OSError):
            remove_abandoned(folder)
        yield started_s
    finally:
        _release(folder, descriptor, is_new=is_new)


def _acquire(folder: Path) -> int:
    """Return the descriptor of the locked file. The file may be removed just before it is locked: then once more."""
    path = folder / LOCK
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = open_lock_file(path)
        except OSError as error:
            reason = error.strerror
            raise RecipeError(f"--run-dir: {folder} cannot be written to: {reason} (name another)") from None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                holder = _describe_owner(descriptor)
                os.close(descriptor)
                raise RecipeError(f"--run-dir: {folder} is in use by {holder}, or name another)") from None
        if _is_same_file(path, descriptor):
            return descriptor
        os.close(descriptor)


def _release(folder: Path, descriptor: int, *, is_new: bool) -> None:
    with contextlib.suppress(OSError):
        if [each.name for each in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            if is_new:
                folder.rmdir()
    os.close(descriptor)


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _read_owner(descriptor: int) -> dict[str, Any]:
    """Return what the holder of the lock, or the one before, has written; nothing where that cannot be read."""
    try:
        who = parse_json(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return who if isinstance(who, dict) else {}


def _describe_owner(descriptor: int) -> str:
    """Return who has the lock, and what to do about it."""
    who = _read_owner(descriptor)
    try:
        pid, host, launcher = int(who["pid"]), str(who["host"]), int(who["launcher_pid"])
    except (ValueError, KeyError, TypeError):
        return "another process (wait for it"
    started = f", started by {launcher}" if launcher else ""
    return f"process {pid} on {host}{started} (wait for it, stop it with `kill {launcher or pid}`"
