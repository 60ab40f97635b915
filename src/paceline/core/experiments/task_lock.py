"""Several processes at work in one experiment's folder: which may be there at once, and how they write the same file.

Locks are POSIX record locks, as in `core.run_dir`: they hold between the nodes of a file system that has them, such as
NFS, and the kernel lets go of them when a process dies. One without locks protects nothing, nor does one whose locks
end at the node (Lustre's mount option `localflock`).
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

_LOCKED_ERRNOS: Final = {errno.EACCES, errno.EAGAIN}  # which of them is up to the system: fcntl(2), F_SETLK


@contextlib.contextmanager
def lock_task(folder: Path, number: int) -> Iterator[None]:
    """Hold the lock of task `number`, from 1, in `folder`: other tasks may run, but not the same task or the whole
    experiment.

    It locks one byte of the file that `core.run_dir` locks as a whole. Raise `RecipeError` if the task or the whole
    experiment is running, and if the folder cannot be written to.
    """
    descriptor = _open_lock(folder / LOCK)
    try:
        if not _is_locked(descriptor, 1, number):
            raise RecipeError(f"--run-dir: {folder}: {_read_owner(descriptor, number)} (wait for it)")
        _write_owner(descriptor, number)
        yield
        _clear_owner(descriptor, number)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive_lock(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock file `path`, which is created, exclusively; call `on_wait` before waiting for others.

    A second lock by the same process does not wait for the first. Raise `RecipeError` if the file cannot be created.
    """
    descriptor = _open_lock(path)
    try:
        if not _is_locked(descriptor, 0, 0):
            on_wait()
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_shared(path: Path, text: str) -> None:
    """Write a file that other processes may read and write at the same time; leave it if its text is equal. Raise
    `OSError`.
    """
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


def _is_locked(descriptor: int, num_bytes: int, start: int) -> bool:
    """Try to lock these bytes (0: all from `start` on); return whether it worked."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, num_bytes, start)
    except OSError as error:
        if error.errno in _LOCKED_ERRNOS:
            return False
        if error.errno not in NO_LOCKS:
            raise
    return True


def _write_owner(descriptor: int, number: int) -> None:
    """Write this process's identity where `core.run_dir` reads it; of several tasks the last one remains."""
    who = {"pid": os.getpid(), "host": os.uname().nodename, "launcher_pid": 0, "task": number}
    with contextlib.suppress(OSError):  # on a full disk the holder stays without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(who).encode(), 0)


def _clear_owner(descriptor: int, number: int) -> None:
    """Remove this process's identity, so that a process refused by other tasks does not name it."""
    with contextlib.suppress(OSError):
        if _read_descriptor(descriptor).get("task") == number:
            os.ftruncate(descriptor, 0)


def _read_owner(descriptor: int, number: int) -> str:
    match _read_descriptor(descriptor):
        case {"pid": int(pid), "host": str(host), "task": int(other)} if other == number:
            return f"task {number} is being run by process {pid} on {host}"
        case {"pid": int(pid), "host": str(host)} as who if "task" not in who:
            return f"all of it is being run by process {pid} on {host}"
    return f"task {number} is being run by another process"


def _read_descriptor(descriptor: int) -> dict[str, object]:
    try:
        who = parse_json(os.pread(descriptor, 1000, 0))
    except (OSError, ValueError):
        return {}
    return who if isinstance(who, dict) else {}
