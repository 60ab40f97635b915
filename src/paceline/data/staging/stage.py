"""Copy the files of a dataset into memory or to a local disk: once per node, complete or not at all.

A copy is a folder `paceline-stage-DIGEST`; the digest covers every file's path, size and modification time, so a
changed source gets a new copy. Files are copied to `paceline-stage-DIGEST.tmp`, which is renamed when it is complete;
the next run completes that of a killed run. Readers hold `.lock` shared until they exit, writers and removers hold it
exclusively. The last reader removes the copy, unless `.kept` exists. A run that makes another copy removes those of
dead runs.
"""

import contextlib
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.errors import DataError
from paceline.core.files import open_lock_file
from paceline.core.host import memory_left_bytes
from paceline.core.units import count, size
from paceline.data.file_lock import FileLock, acquire_file_lock
from paceline.data.files import expand_path, printable
from paceline.data.staging.copy import CopyProgress, copy_files, is_copy_complete, sync_filesystem
from paceline.data.staging.inventory import CopySize, FileInventory, build_inventory, round_to_pages
from paceline.recipe.schema.source import SourceSection

_PREFIX: Final = "paceline-stage-"
_LOCK_POLL_S: Final = 0.2
PROC: Final = Path("/proc")
_MEMORY_FILESYSTEMS: Final = {"tmpfs", "ramfs"}
# Fraction of free memory that a copy must leave to the run.
_RESERVED_FRACTION: Final = 0.1


def ignore_progress(done_bytes: int, num_bytes: int) -> None:
    """Ignore progress."""


@contextlib.contextmanager
def stage_for_run(
    section: SourceSection,
    folder: str,
    *,
    is_first: bool,
    skip_bad: bool = False,
    memory_left: Callable[[], float] = memory_left_bytes,
    progress: CopyProgress = ignore_progress,
) -> Iterator[SourceSection]:
    """Yield `section` changed to read from a copy of its files in `folder`; `off` yields it unchanged.

    Only the process with `is_first` copies, so it must call this before the others of its node. `skip_bad` is as for
    `build_datasets`, `memory_left` as for `measure_free_space`. Raise `DataError` if there is no space, nothing to
    copy, or a file that cannot be copied.
    """
    if folder == "off":
        yield section
        return
    inventory = build_inventory(section, skip_bad=skip_bad)
    total = inventory.measure()
    copy = _CopyPaths(_open_stage_folder(folder, make=True) / f"{_PREFIX}{total.digest}")
    lock = (
        _lock_or_make_copy(copy, inventory, total, memory_left, progress)
        if is_first
        else _lock_existing_copy(copy, inventory, progress)
    )
    try:
        yield inventory.section_at(copy.folder)
    finally:
        # Only the last process of the node gets the lock exclusively.
        if lock.try_make_exclusive() and lock.is_current and not copy.keep_marker.exists():
            copy.remove(lock)
        lock.close()


def stage_permanently(
    section: SourceSection,
    folder: Path,
    progress: CopyProgress = ignore_progress,
    *,
    skip_bad: bool = False,
    memory_left: Callable[[], float] = memory_left_bytes,
) -> Path:
    """Copy the files of `section` to `folder`, where they stay until `unstage`; return the copy's folder.

    A run with the same `data.stage` uses it. `skip_bad`, `memory_left` and errors are as for `stage_for_run`.
    """
    inventory = build_inventory(section, skip_bad=skip_bad)
    total = inventory.measure()
    copy = _CopyPaths(_open_stage_folder(str(folder), make=True) / f"{_PREFIX}{total.digest}")
    with contextlib.closing(_lock_or_make_copy(copy, inventory, total, memory_left, progress)):
        os.close(open_lock_file(copy.keep_marker, 0o600))
    return copy.folder


def build_staged_section(section: SourceSection, copy: Path, *, skip_bad: bool = False) -> SourceSection:
    """Return `section` changed to read from `copy`, a folder that `stage_permanently` returned with `skip_bad`."""
    return build_inventory(section, skip_bad=skip_bad).section_at(copy)


def unstage(folder: Path) -> tuple[Path, ...]:
    """Remove all copies in `folder` and return them, permanent ones too. Raise `DataError` if one is in use."""
    removed = []
    for copy in _list_copies(_open_stage_folder(str(folder), make=False)):
        lock = acquire_file_lock(copy.lock, is_exclusive=True, should_wait=False)
        if lock is None:
            raise DataError(f"{printable(copy.folder)}: is in use by a run (wait until the run has ended)")
        copy.remove(lock)
        removed.append(copy.folder)
    return tuple(removed)


@dataclass(frozen=True)
class _CopyPaths:
    folder: Path

    @property
    def partial(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.tmp")

    @property
    def lock(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.lock")

    @property
    def keep_marker(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.kept")

    def mark_partial(self) -> None:
        # From now on, no process uses it as a complete copy.
        with contextlib.suppress(FileNotFoundError):
            self.folder.rename(self.partial)

    def remove(self, lock: FileLock) -> None:
        """Remove all files of the copy; this process must hold `lock` exclusively."""
        self.mark_partial()  # first, as a kill during the removal would leave an incomplete copy that looks complete
        shutil.rmtree(self.partial, ignore_errors=True)
        self.keep_marker.unlink(missing_ok=True)
        lock.remove()


def _lock_or_make_copy(
    copy: _CopyPaths,
    inventory: FileInventory,
    total: CopySize,
    memory_left: Callable[[], float],
    progress: CopyProgress,
) -> FileLock:
    _remove_stale_copies(copy)
    while True:
        lock = _wait_for_shared_lock(copy, lambda: progress(0, total.num_bytes))
        if _is_complete(copy, inventory):
            return lock
        # `flock` releases the shared lock before it takes the exclusive one: another process may get in between, make
        # the copy or remove the lock file.
        if lock.try_make_exclusive() and lock.is_current:
            try:
                _make_copy(copy, inventory, total, memory_left, progress)
                lock.make_shared()
            except BaseException as error:
                copy.remove(lock)
                if isinstance(error, OSError):
                    raise DataError(f"data.stage: {printable(copy.folder)}: {error.strerror} (name another)") from error
                raise
            if lock.is_current and copy.folder.is_dir():  # not removed while the lock changed to shared
                return lock
        lock.close()
        if copy.folder.is_dir() and not _is_complete(copy, inventory) and _is_in_use(copy):
            raise DataError(f"{printable(copy.folder)}: lacks files and is in use by another run (wait until it ends)")


def _lock_existing_copy(copy: _CopyPaths, inventory: FileInventory, progress: CopyProgress) -> FileLock:
    lock = _wait_for_shared_lock(copy, lambda: progress(0, 0))
    if copy.folder.is_dir():
        return lock
    lock.close()
    raise DataError(f"{inventory.title}: changed while it was staged (start again when it no longer changes)")


def _make_copy(
    copy: _CopyPaths,
    inventory: FileInventory,
    total: CopySize,
    memory_left: Callable[[], float],
    progress: CopyProgress,
) -> None:
    copy.mark_partial()  # a copy that was complete lacks files
    copy.partial.mkdir(mode=0o700, exist_ok=True)
    _check_owner(copy.partial)
    free = measure_free_space(copy.partial, memory_left)
    check_free_space(total.subtract(_measure_folder(copy.partial)), free, copy.folder.parent, inventory.title)
    copy_files(inventory.iter_files(), copy.partial, total.num_bytes, progress)
    sync_filesystem(copy.partial)  # before the rename: after a power failure, a folder of this name is complete
    copy.partial.rename(copy.folder)


def _is_complete(copy: _CopyPaths, inventory: FileInventory) -> bool:
    if not copy.folder.is_dir():
        return False
    _check_owner(copy.folder)
    return is_copy_complete(inventory.iter_files(), copy.folder)


def _is_in_use(copy: _CopyPaths) -> bool:
    lock = acquire_file_lock(copy.lock, is_exclusive=True, should_wait=False)
    if lock is None:
        return True
    lock.close()
    return False


def _wait_for_shared_lock(copy: _CopyPaths, on_wait: Callable[[], None]) -> FileLock:
    # Another process holds the lock exclusively while it copies or removes. `on_wait` may raise to cancel.
    try:
        while (lock := acquire_file_lock(copy.lock, is_exclusive=False, should_wait=False)) is None:
            on_wait()
            threading.Event().wait(_LOCK_POLL_S)
    except OSError as error:
        raise DataError(f"data.stage: {printable(copy.lock)}: {error.strerror} (name another folder)") from error
    return lock


def _remove_stale_copies(needed: _CopyPaths) -> None:
    for copy in _list_copies(needed.folder.parent):
        if copy == needed or copy.keep_marker.exists():
            continue
        with contextlib.suppress(OSError):  # it belongs to another user
            lock = acquire_file_lock(copy.lock, is_exclusive=True, should_wait=False)
            if lock is not None:
                copy.remove(lock)


def _list_copies(folder: Path) -> list[_CopyPaths]:
    names = {path.name.partition(".")[0] for path in folder.glob(f"{_PREFIX}*")}
    return [_CopyPaths(folder / name) for name in sorted(names) if _is_owned_by_user(folder / f"{name}.lock")]


def _is_owned_by_user(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False


def _check_owner(folder: Path) -> None:
    # Anyone can create a folder of this name in a world-writable place such as /dev/shm.
    if folder.is_symlink() or not _is_owned_by_user(folder):
        raise DataError(f"data.stage: {printable(folder)} was made by another user (name another folder)")


def _measure_folder(folder: Path) -> CopySize:
    sizes = [(Path(path) / name).lstat().st_size for path, _, names in os.walk(folder) for name in names]
    return CopySize("", len(sizes), sum(sizes), sum(round_to_pages(num_bytes) for num_bytes in sizes))


def _open_stage_folder(text: str, *, make: bool) -> Path:
    folder = expand_path(text).absolute()
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        folder.stat()
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"data.stage: {printable(folder)}: {reason} (name a folder that can be written to)") from None
    return folder


@dataclass(frozen=True)
class FreeSpace:
    """Free space of a folder; `limit` says in a message what limits it."""

    num_bytes: float
    limit: str
    num_files: float  # that can be created


def measure_free_space(folder: Path, memory_left: Callable[[], float], proc: Path = PROC) -> FreeSpace:
    """Return the free space of `folder`, at most nine tenths of the free memory for a folder in memory.

    `memory_left` returns the bytes left in the process's control group.
    """
    status = os.statvfs(folder)
    free = FreeSpace(status.f_bavail * status.f_frsize, "free there", status.f_favail or math.inf)
    if not is_in_memory(folder, proc):
        return free
    limits = ((_read_available_memory(proc), "of memory are free"), (memory_left(), "of memory are left to this job"))
    memory = [
        FreeSpace(num_bytes * (1 - _RESERVED_FRACTION), f"{limit}, less a tenth", free.num_files)
        for num_bytes, limit in limits
    ]
    return min((free, *memory), key=lambda space: space.num_bytes)


def check_free_space(needed: CopySize, free: FreeSpace, folder: Path, title: str) -> None:
    """Raise `DataError` if the files `needed` do not fit into `folder`."""
    prefix = f"data.stage: {printable(folder)} does not have enough space for {title}"
    fix = "(free some, choose another folder, or set data.stage=off)"
    if needed.disk_bytes > free.num_bytes:
        raise DataError(f"{prefix}: {size(needed.disk_bytes)} are needed, {size(free.num_bytes)} {free.limit} {fix}")
    if needed.num_files > free.num_files:
        raise DataError(f"{prefix}: {count(needed.num_files, 'file')}, {free.num_files:,.0f} more can be created {fix}")


def is_in_memory(folder: Path, proc: Path = PROC) -> bool:
    """Return whether the file system of `folder` is in memory (`man 5 proc_pid_mountinfo`)."""
    device = os.stat(folder).st_dev  # noqa: PTH116 - beside os.major
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = (proc / "self" / "mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    mounts = [line.split() for line in lines]
    return any(fields[2] == number and fields[fields.index("-") + 1] in _MEMORY_FILESYSTEMS for fields in mounts)


def _read_available_memory(proc: Path) -> float:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(kib) * 1024 if kib else math.inf
