"""Locks for tasks of one experiment that run at the same time, such as those of a Slurm job array.

POSIX record locks, as in `core.run_dir`: they work between nodes on file systems with locks, such as NFS, and end with
the process. A file system without locks, or with locks per node (Lustre's `localflock`), protects nothing.
"""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from paceline.core.errors import RecipeError
from paceline.core.files import open_lock_file, read_text
from paceline.core.json_file import parse_json
from paceline.core.run_dir import LOCK, NO_LOCKS, write_atomic

_LOCKED_ERRNOS: Final = {errno.EACCES, errno.EAGAIN}  # either, depending on the system: fcntl(2), F_SETLK


@contextlib.contextmanager
def lock_task(folder: Path, number: int) -> Iterator[None]:
    """Hold the lock of task `number`, from 1, in `folder`, exclusive with the same task and the whole experiment.

    Raise `RecipeError` if either is running, and if the folder cannot be written to.
    """
    # Byte `number` of the file that `core.run_dir` locks as a whole.
    descriptor = _open_lock(folder / LOCK)
    try:
        if not _try_lock(descriptor, 1, number):
            raise RecipeError(f"--run-dir: {folder}: {_read_owner(descriptor, number)} (wait for it)")
        _write_owner(descriptor, number)
        yield
        _clear_owner(descriptor, number)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive_lock(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock file `path`, which is created; call `on_wait` before waiting for others.

    Not reentrant: a second lock by the same process does not wait. Raise `RecipeError` if the file cannot be created.
    """
    descriptor = _open_lock(path)
    try:
        if not _try_lock(descriptor, 0, 0):
            on_wait()
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_shared(path: Path, text: str) -> None:
    """Write a file that other processes read and write, unless its text is equal. Raise `OSError`."""
    with contextlib.suppress(OSError, ValueError):
        if read_text(path) == text:
            return
    write_atomic(path, text)


def _open_lock(path: Path) -> int:
    try:
        return open_lock_file(path)
    except OSError as error:
        reason = error.strerror
        raise RecipeError(f"--run-dir: {path.parent} cannot be written to: {reason} (name another)") from None


def _try_lock(descriptor: int, num_bytes: int, start: int) -> bool:
    """Lock these bytes (0: all from `start`); return False if another process has them."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, num_bytes, start)
    except OSError as error:
        if error.errno in _LOCKED_ERRNOS:
            return False
        if error.errno not in NO_LOCKS:
            raise
    return True  # also on a file system without locks, where nothing protects


def _write_owner(descriptor: int, number: int) -> None:
    """Write this process's identity where `core.run_dir` reads it; the last of several tasks wins."""
    owner = {"pid": os.getpid(), "host": os.uname().nodename, "launcher_pid": 0, "task": number}
    with contextlib.suppress(OSError):  # a full disk: the lock holds, only its owner is unknown
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)


def _clear_owner(descriptor: int, number: int) -> None:
    # Else a process that another task's lock refuses would name this one.
    with contextlib.suppress(OSError):
        if _read_descriptor(descriptor).get("task") == number:
            os.ftruncate(descriptor, 0)


def _read_owner(descriptor: int, number: int) -> str:
    match _read_descriptor(descriptor):
        case {"pid": int(pid), "host": str(host), "task": int(other)} if other == number:
            return f"task {number} is being run by process {pid} on {host}"
        case {"pid": int(pid), "host": str(host)} as owner if "task" not in owner:
            return f"all of it is being run by process {pid} on {host}"
    return f"task {number} is being run by another process"


def _read_descriptor(descriptor: int) -> dict[str, object]:
    try:
        owner = parse_json(os.pread(descriptor, 1000, 0))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}
