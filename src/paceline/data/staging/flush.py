"""Sync a file system, so that a finished copy survives a power loss."""

import ctypes
import os
import sys
from pathlib import Path


def sync_filesystem(folder: Path) -> None:
    """Sync the file system of `folder` (Linux), or all file systems (elsewhere)."""
    if not sys.platform.startswith("linux"):
        os.sync()
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        ctypes.CDLL(None, use_errno=True).syncfs(descriptor)
    finally:
        os.close(descriptor)
