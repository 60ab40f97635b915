"""Lock files with `flock`, and create folders atomically under such a lock."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import DataError
from paceline.core.files import RefusedFileError, make_folder, move_without_overwriting, open_lock_file
from paceline.core.run_dir import NO_LOCKS
from paceline.data.files import printable


# Unlike the record locks of `core.run_dir`, `flock` locks can be shared and exclude other threads. A forked child
# inherits them, so only the process that took one releases it. A file system without locks protects nothing. The files
# stay empty, and only a process with an exclusive lock removes one. The library `filelock` has exclusive locks,
# and shared ones of SQLite, which neither become exclusive nor work in a forked child.
@dataclass
class FileLock:
    """A lock that process `pid` holds on the file `path`."""

    path: Path
    descriptor: int
    pid: int

    # flock(2): converting a lock is not atomic, the kernel releases the old one first.
    def try_make_exclusive(self) -> bool:
        """Try to make the lock exclusive; on failure, no lock is held any more."""
        return _flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def make_shared(self) -> None:
        """Make the lock shared; another process may lock and remove the file in between."""
        _flock(self.descriptor, fcntl.LOCK_SH)

    @property
    def is_current(self) -> bool:
        """Whether `path` still names the locked file."""
        return _is_file_at(self.path, self.descriptor)

    def close(self) -> None:
        """Release the lock; a forked child only closes its descriptor."""
        if self.descriptor < 0:
            return
        if self.pid == os.getpid():
            _flock(self.descriptor, fcntl.LOCK_UN)
        os.close(self.descriptor)
        self.descriptor = -1

    def remove(self) -> None:
        """Remove the file, which must be locked exclusively, and release the lock."""
        self.path.unlink(missing_ok=True)
        self.close()


def acquire_file_lock(path: Path, *, is_exclusive: bool, should_wait: bool) -> FileLock | None:
    """Create the file `path` if needed and lock it; return None if it is locked and `should_wait` is false.

    Raise `OSError` if the file cannot be created, is a link, or belongs to another user.
    """
    operation = (fcntl.LOCK_EX if is_exclusive else fcntl.LOCK_SH) | (0 if should_wait else fcntl.LOCK_NB)
    while True:
        descriptor = open_lock_file(path, 0o600)
        try:
            is_locked = _flock(descriptor, operation)
        except BaseException:
            os.close(descriptor)
            raise
        if is_locked and _is_file_at(path, descriptor):
            return FileLock(path, descriptor, os.getpid())
        os.close(descriptor)  # if it is locked, another process has removed the file meanwhile: try again
        if not is_locked:
            return None


def _flock(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:  # else the file system has no locks: behave as if locked
            raise
    return True


def _is_file_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def create_folder_atomically(out: Path, suffix: str, lock_name: str) -> Iterator[Path]:
    """Yield an empty folder `.NAME.SUFFIX` beside `out` and rename it to `out`; remove it on any error.

    Raise `DataError` if another process holds its lock, or an earlier call did not leave it, and `FileExistsError` if
    `out` exists at the end.
    """
    temporary = out.with_name(f".{out.name}.{suffix}")
    try:
        make_folder(temporary, parents=True)
    except RefusedFileError as error:
        raise DataError(f"{printable(temporary)}: {error.strerror} (remove it, or write elsewhere)") from error
    # The lock file identifies what a killed call has left; any other folder of that name belongs to the user.
    names = sorted(path.name for path in temporary.iterdir())
    if names and lock_name not in names:
        raise DataError(
            f"{printable(temporary)}: holds {printable(names[0])}, which no earlier attempt has left (move it away, or "
            f"write elsewhere)"
        )
    lock = acquire_file_lock(temporary / lock_name, is_exclusive=True, should_wait=False)
    if lock is None:
        raise DataError(f"{printable(temporary)}: another process is writing it (wait for it, or end it)")
    with contextlib.closing(lock):
        try:
            for entry in temporary.iterdir():
                if entry.name != lock_name:
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            yield temporary
            move_without_overwriting(temporary, out)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        (out / lock_name).unlink()  # after the rename, so that the folder of a killed call stays recognizable
