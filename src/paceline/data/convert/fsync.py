"""Flush files and folders to disk."""

import errno
import os
from pathlib import Path
from typing import IO


def fsync_file(file: IO[bytes]) -> None:
    """Flush an open file to disk."""
    file.flush()
    os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # some file systems refuse to sync a folder
            raise
    finally:
        os.close(descriptor)
