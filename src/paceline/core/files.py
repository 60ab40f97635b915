"""Open files safely in directories that other users may write to.

Files are only written to if they are regular, have one hard link, and belong to this user or to the owner of the
directory. Symbolic links are not followed; pipes and devices are neither opened nor waited for. Files are replaced
atomically. A directory that the user names may itself be a link; these rules apply to the files in it.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import BinaryIO, Final, Literal, TextIO, cast

_TEMPORARY: Final = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
_SAFE_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # non-blocking: opening a pipe would wait
_NO_RENAME_FLAGS: Final = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors of kernels and file systems without RENAME_NOREPLACE."""
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1  # Linux's fcntl.h and fs.h


class RefusedFileError(OSError):
    """A file that paceline does not open. `str` is the reason alone."""

    def __str__(self) -> str:
        return str(self.strerror)


def open_to_write(path: Path, mode: Literal["xb", "x+b", "wb", "ab", "a+b", "r+b"]) -> BinaryIO:
    """Open a file for writing as `open` does. Raise `OSError`; `RefusedFileError` for a link or another user's file."""
    return open(path, mode, opener=_open_checked)


def open_text_to_write(path: Path, mode: Literal["x", "w", "a"], newline: str | None = None) -> TextIO:
    """Open a UTF-8 file for writing, as `open_to_write` does."""
    binary = open_to_write(path, cast(Literal["xb", "wb", "ab"], f"{mode}b"))
    return TextIOWrapper(binary, encoding="utf-8", newline=newline)


def open_lock_file(path: Path, permissions: int = 0o666) -> int:
    """Open or create a lock file; return its descriptor. Raise as `open_to_write`."""
    return _open_checked(os.fspath(path), os.O_RDWR | os.O_CREAT, permissions)


def write_new(path: Path, content: str | bytes) -> int:
    """Write a file that must not exist; return its size in bytes. Raise `OSError`."""
    with open_to_write(path, "xb") as file:
        return file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replace_file(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Return a context that writes a temporary file and renames it to `path` at its end.

    Readers never see a partial file. A link at `path` is replaced, not followed. `sync`: flush to disk before the
    rename. Raise `OSError`; `path` then keeps its old content.
    """
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            file = open_to_write(temporary, "xb")
        except FileExistsError:
            continue
        break
    try:
        with file:
            # The lock tells `remove_abandoned` that the writer is alive.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())  # else a power failure after the rename may leave an empty file
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_output(path: Path, text: str) -> None:
    """Write `text` to a file that the user named. Raise `OSError`.

    Pipes, devices and the target of standard output or error are written into; a regular file is replaced.
    """
    # /dev/stdout may lead to a regular file, which must not be replaced.
    descriptor = _standard_stream(path)
    if descriptor is not None or (path.exists() and not (path.is_file() or path.is_dir())):
        target = path if descriptor is None else os.dup(descriptor)
        with open(target, "w", encoding="utf-8", newline="") as file:  # noqa: PTH123 - it may be a descriptor
            file.write(text)
        return
    with replace_file(path) as file:
        file.write(text.encode())


def _standard_stream(path: Path) -> int | None:
    """Return the descriptor of stdout or stderr if `path` is the same file, else None."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, in a notebook, or no such path
            descriptor = stream.fileno()
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                stream.flush()
                return descriptor
    return None


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files of `replace_file` that killed processes left in `folder`."""
    for path in [each for each in folder.iterdir() if _TEMPORARY.fullmatch(each.name)]:
        with contextlib.suppress(OSError):  # still being written, or another user's
            descriptor = open_lock_file(path)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def move_without_overwriting(source: Path, path: Path) -> None:
    """Rename a file or directory to `path`, which must not exist. Raise `FileExistsError` if it does."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        if rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE) == 0:
            return
        code = ctypes.get_errno()
        if code not in _NO_RENAME_FLAGS:
            raise OSError(code, os.strerror(code), str(path))
    # Without RENAME_NOREPLACE: claim the name exclusively, then rename over the placeholder.
    is_folder = source.is_dir()
    if is_folder:
        path.mkdir()
    else:
        open_to_write(path, "xb").close()
    try:
        source.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            path.rmdir() if is_folder else path.unlink()
        raise


def make_folder(path: Path, permissions: int = 0o777, *, parents: bool = False) -> None:
    """Create a directory unless it exists.

    Raise `RefusedFileError` for a link or another user's directory, and `FileExistsError` for a file.
    """
    try:
        path.mkdir(permissions, parents=parents)
    except FileExistsError:
        status = path.lstat()
        _refuse_link(status, path.name)
        if not stat.S_ISDIR(status.st_mode):
            raise
        _refuse_other_owner(status, path)


def open_to_read(path: Path, *, follow_links: bool = True) -> BufferedReader:
    """Open a regular file for reading. Raise `OSError`; `RefusedFileError` for a pipe or a device, at once.

    Links are followed unless `follow_links` is False.
    """

    def opened(name: str, flags: int) -> int:
        if not follow_links:
            _refuse_link(os.lstat(name), Path(name).name)
            flags |= os.O_NOFOLLOW
        # Without O_NONBLOCK, opening a pipe waits for a writer before its type can be checked.
        descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)
        return _checked_descriptor(descriptor, lambda status: _refuse_special(status, name))

    return open(path, "rb", opener=opened)


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file. Raise as `open_to_read`."""
    with open_to_read(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Return the UTF-8 text of a regular file, with line ends as `\\n`. Raise `OSError` or `UnicodeDecodeError`."""
    with TextIOWrapper(open_to_read(path), encoding="utf-8") as file:
        return file.read()


def _open_checked(name: str, flags: int, permissions: int = 0o666) -> int:
    """Open a file for writing, and check it before it is truncated or written."""
    path = Path(name)
    # This check only gives a better error message. The file may change before it is opened: O_NOFOLLOW and the checks
    # of the open descriptor protect.
    with contextlib.suppress(FileNotFoundError):
        if not flags & os.O_EXCL:
            before = path.lstat()
            _refuse_link(before, path.name)
            _refuse_special(before, name)
    # Truncate only after the checks.
    descriptor = os.open(path, flags & ~os.O_TRUNC | _SAFE_FLAGS, permissions)

    def check(status: os.stat_result) -> None:
        _refuse_special(status, name)
        if flags & os.O_EXCL:
            return  # this process has just created it
        _refuse_other_owner(status, path)
        if status.st_nlink > 1:
            raise RefusedFileError(errno.EMLINK, f"{path.name} has more than one name (a hard link)", name)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)

    return _checked_descriptor(descriptor, check)


def _checked_descriptor(descriptor: int, check: Callable[[os.stat_result], None]) -> int:
    try:
        check(os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_link(status: os.stat_result, name: str) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise RefusedFileError(errno.ELOOP, f"{name} is a link, which is not followed", name)


def _refuse_special(status: os.stat_result, name: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if not stat.S_ISREG(status.st_mode):
        is_pipe = stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)
        kind = "a pipe" if is_pipe else "a device"
        raise RefusedFileError(errno.EINVAL, f"{Path(name).name} is {kind}, no regular file", name)


def _refuse_other_owner(status: os.stat_result, path: Path) -> None:
    # In a directory that anyone may write to, such as /tmp, trust only this user and the directory's owner, who could
    # replace the file anyway (root over NFS, in containers and on FUSE). Members of a group that shares a directory
    # without the sticky bit are trusted.
    folder = path.parent.stat()
    if folder.st_mode & (stat.S_IWOTH | stat.S_ISVTX) and status.st_uid not in (os.geteuid(), folder.st_uid):
        raise RefusedFileError(errno.EPERM, f"{path.name} was made by another user", str(path))
