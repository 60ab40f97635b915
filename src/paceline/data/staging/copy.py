"""Copy files so that each is either complete and verified, or absent."""

import ctypes
import errno
import os
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from paceline.core.errors import DataError
from paceline.core.files import open_to_write
from paceline.data.files import printable
from paceline.data.staging.inventory import StagedFile

# Called with (bytes copied, total bytes); an exception stops the copy.
CopyProgress = Callable[[int, int], None]
_CHUNK_BYTES: Final = 1 << 20  # small enough that the comparison reads from the CPU cache
_NUM_THREADS: Final = 4  # hides network latency
_MAX_PENDING_FILES: Final = 256
_POLL_S: Final = 0.2  # between calls of `progress`
_DISK_FULL_ERRNOS: Final = {errno.ENOSPC, errno.EDQUOT}


class _ThreadBuffers(threading.local):
    def __init__(self) -> None:
        self.data = bytearray(_CHUNK_BYTES)
        self.read_back = bytearray(_CHUNK_BYTES)


@dataclass
class _CopyState:
    folder: Path
    buffers: _ThreadBuffers = field(default_factory=_ThreadBuffers)
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    done_bytes: int = 0

    def add_done(self, num_bytes: int) -> None:
        with self.lock:
            self.done_bytes += num_bytes


def copy_files(entries: Iterable[StagedFile], folder: Path, num_bytes: int, progress: CopyProgress) -> None:
    """Copy `entries`, `num_bytes` in total, into `folder`, except finished copies of an earlier call.

    Raise `DataError` for a file that cannot be read, changes meanwhile or differs when read back, and for a full disk.
    """
    state = _CopyState(folder)
    running: deque[Future[None]] = deque()
    with ThreadPoolExecutor(_NUM_THREADS, "stage") as pool:
        try:
            for entry in entries:
                running.append(pool.submit(_copy_file, entry, state))
                if len(running) >= _MAX_PENDING_FILES:
                    _wait_for_oldest(running, state, num_bytes, progress)
            while running:
                _wait_for_oldest(running, state, num_bytes, progress)
        except BaseException:
            state.stop.set()  # running copies end after their current chunk
            pool.shutdown(cancel_futures=True)
            raise
    for path in folder.glob(".copying-*"):
        path.unlink()


def _wait_for_oldest(copies: deque[Future[None]], state: _CopyState, num_bytes: int, progress: CopyProgress) -> None:
    wait([copies[0]], timeout=_POLL_S)
    while copies and copies[0].done():
        copies.popleft().result()  # raises the error of the copy
    progress(state.done_bytes, num_bytes)


def _copy_file(entry: StagedFile, state: _CopyState) -> None:
    target = state.folder / entry.name
    if _is_copy(target, entry):
        state.add_done(entry.num_bytes)
        return
    # A hidden name cannot collide with a dataset's file; a short one cannot exceed the limit for names.
    temporary = state.folder / f".copying-{threading.get_ident()}"
    try:
        source = os.open(entry.source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _build_copy_error(entry, error) from error
    try:
        temporary.unlink(missing_ok=True)  # of an earlier attempt
        with open_to_write(temporary, "x+b") as copy:
            _copy_bytes(source, copy.fileno(), entry, state)
        if state.stop.is_set():
            return  # without a rename: the copy may be incomplete
        if _get_size_and_mtime(os.fstat(source)) != (entry.num_bytes, entry.mtime_ns):
            raise DataError(
                f"{printable(entry.source)}: changed while it was copied (start again when it no longer changes)"
            )
        # Size and modification time then identify a complete copy: see `_is_copy`.
        os.utime(temporary, ns=(entry.mtime_ns, entry.mtime_ns))
        try:
            temporary.rename(target)
        except FileNotFoundError:  # the first file of its folder
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary.rename(target)
    except OSError as error:
        raise _build_copy_error(entry, error) from error
    finally:
        os.close(source)


def _copy_bytes(source: int, copy: int, entry: StagedFile, state: _CopyState) -> None:
    data, back = state.buffers.data, state.buffers.read_back
    offset = 0
    while not state.stop.is_set():
        # One byte more than expected shows a file that grows.
        num_read = os.readv(source, [memoryview(data)[: entry.num_bytes - offset + 1]])
        if not num_read:
            return
        if offset + num_read > entry.num_bytes:
            raise DataError(
                f"{printable(entry.source)}: grew while it was copied (start again when it no longer changes)"
            )
        chunk = memoryview(data)[:num_read]
        written = 0
        while written < num_read:
            written += os.write(copy, chunk[written:])
        num_back = os.preadv(copy, [memoryview(back)[:num_read]], offset)
        # Comparing memoryviews is slow (byte by byte).
        same = data == back if num_read == _CHUNK_BYTES else data[:num_read] == back[:num_read]
        if num_back != num_read or not same:
            raise DataError(
                f"{printable(state.folder)}: returned other bytes than were written (choose another folder)"
            )
        offset += num_read
        state.add_done(num_read)


def _is_copy(target: Path, entry: StagedFile) -> bool:
    try:
        status = target.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and _get_size_and_mtime(status) == (entry.num_bytes, entry.mtime_ns)


def is_copy_complete(entries: Iterable[StagedFile], folder: Path) -> bool:
    """Return whether `folder` has all `entries`, with the size and modification time of their sources."""
    return all(_is_copy(folder / entry.name, entry) for entry in entries)


def _get_size_and_mtime(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _build_copy_error(entry: StagedFile, error: OSError) -> DataError:
    if error.errno in _DISK_FULL_ERRNOS:
        return DataError(
            f"data.stage: no room is left for {printable(entry.source)} (free some, or set data.stage=off)"
        )
    return DataError(f"{printable(entry.source)}: cannot be copied: {error.strerror} (fix it, or set data.stage=off)")


def sync_filesystem(folder: Path) -> None:
    """Flush the file system of `folder` to disk (Linux), or all file systems (elsewhere)."""
    # One call instead of an fsync for each of a million files.
    if not sys.platform.startswith("linux"):
        os.sync()
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        ctypes.CDLL(None, use_errno=True).syncfs(descriptor)
    finally:
        os.close(descriptor)
