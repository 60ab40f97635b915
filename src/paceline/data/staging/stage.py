"""Copy the files of a data set into memory or to a local disk: once per node, complete or not at all.

A copy is a folder `paceline-stage-DIGEST`; the digest covers every file's path, size and modification time, so a
changed source gets a new copy. The copy is written to `paceline-stage-DIGEST.tmp` and renamed when it is complete; a
killed run leaves a partial folder that the next run completes. Writers and removers hold `.lock` exclusively, readers
hold it shared until they exit. The last reader removes the copy, unless `.kept` exists. A run that needs another copy
removes those of dead runs.
"""

import contextlib
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
from paceline.data.file_lock import FileLock, acquire_file_lock
from paceline.data.files import expand_path, printable
from paceline.data.staging.copy import CopyProgress, copy_files, is_copy_complete, sync_filesystem
from paceline.data.staging.inventory import CopySize, FileInventory, build_inventory, round_to_pages
from paceline.data.staging.space import check_free_space, measure_free_space
from paceline.recipe.schema.source import SourceSection

_PREFIX: Final = "paceline-stage-"
_LOCK_POLL_S: Final = 0.2


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
    """Yield `section` changed to read from a copy of its files in folder `folder`; `off` yields it unchanged.

    The first process of a node copies, the others then find the copy; each holds a lock until it exits. `skip_bad` is
    as for `build_datasets`; `memory_left` returns the bytes that this process's control group may still use; `progress`
    receives bytes done and in total, and may raise to cancel. Raise `DataError` if there is no space, nothing to copy,
    or a file that cannot be copied.
    """
    if folder == "off":
        yield section
        return
    inventory = build_inventory(section, skip_bad=skip_bad)
    stock = inventory.measure()
    spot = _CopyPaths(_open_stage_folder(folder, make=True) / f"{_PREFIX}{stock.digest}")
    lock = (
        _lock_or_make_copy(spot, inventory, stock, memory_left, progress)
        if is_first
        else _lock_existing_copy(spot, inventory, progress)
    )
    try:
        yield inventory.section_at(spot.folder)
    finally:
        if lock.try_make_exclusive() and lock.is_current and not spot.keep_marker.exists():
            spot.remove(lock)
        lock.close()


def stage_permanently(
    section: SourceSection,
    folder: Path,
    progress: CopyProgress = ignore_progress,
    *,
    memory_left: Callable[[], float] = memory_left_bytes,
) -> Path:
    """Copy what `section` reads to folder `folder`, where it stays until `unstage`; return the copy's folder.

    A run with the same `data.stage` uses it. Raise `DataError` as `stage_for_run` does.
    """
    inventory = build_inventory(section)
    stock = inventory.measure()
    spot = _CopyPaths(_open_stage_folder(str(folder), make=True) / f"{_PREFIX}{stock.digest}")
    with contextlib.closing(_lock_or_make_copy(spot, inventory, stock, memory_left, progress)):
        os.close(open_lock_file(spot.keep_marker, 0o600))
    return spot.folder


def build_staged_section(section: SourceSection, copy: Path) -> SourceSection:
    """Return `section` changed to read from a folder that `stage_permanently` returned."""
    return build_inventory(section).section_at(copy)


def unstage(folder: Path) -> tuple[Path, ...]:
    """Remove all copies in `folder`, permanent ones included; return them. Raise `DataError` if one is in use."""
    removed = []
    for spot in _list_copies(_open_stage_folder(str(folder), make=False)):
        lock = acquire_file_lock(spot.lock, is_exclusive=True, should_wait=False)
        if lock is None:
            raise DataError(f"{printable(spot.folder)}: is in use by a run (wait until the run has ended)")
        spot.remove(lock)
        removed.append(spot.folder)
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
        """Rename a complete copy to a partial one, so that no process uses it any more."""
        with contextlib.suppress(FileNotFoundError):
            self.folder.rename(self.partial)

    def remove(self, lock: FileLock) -> None:
        """Remove all files of the copy; this process must hold `lock` exclusively."""
        self.mark_partial()
        shutil.rmtree(self.partial, ignore_errors=True)
        self.keep_marker.unlink(missing_ok=True)
        lock.remove()


def _lock_or_make_copy(
    spot: _CopyPaths,
    inventory: FileInventory,
    stock: CopySize,
    memory_left: Callable[[], float],
    progress: CopyProgress,
) -> FileLock:
    """Return a shared lock on a complete copy; make the copy if there is none."""
    _remove_stale_copies(spot)
    while True:
        lock = _wait_for_shared_lock(spot, lambda: progress(0, stock.num_bytes))
        if _is_complete(spot, inventory):
            return lock
        if lock.try_make_exclusive() and lock.is_current:
            try:
                _make_copy(spot, inventory, stock, memory_left, progress)
                lock.make_shared()
            except BaseException as error:
                spot.remove(lock)
                if isinstance(error, OSError):
                    raise DataError(f"data.stage: {printable(spot.folder)}: {error.strerror} (name another)") from error
                raise
            if lock.is_current and spot.folder.is_dir():
                return lock
        lock.close()
        if spot.folder.is_dir() and not _is_complete(spot, inventory) and _is_in_use(spot):
            raise DataError(f"{printable(spot.folder)}: lacks files and is in use by another run (wait until it ends)")


def _lock_existing_copy(spot: _CopyPaths, inventory: FileInventory, progress: CopyProgress) -> FileLock:
    lock = _wait_for_shared_lock(spot, lambda: progress(0, 0))
    if spot.folder.is_dir():
        return lock
    lock.close()
    raise DataError(f"{inventory.title}: changed while it was staged (start again when it no longer changes)")


def _make_copy(
    spot: _CopyPaths,
    inventory: FileInventory,
    stock: CopySize,
    memory_left: Callable[[], float],
    progress: CopyProgress,
) -> None:
    """Copy into the partial folder, continuing an earlier attempt; rename it once it is complete and flushed."""
    spot.mark_partial()  # a copy that was complete lacks files
    spot.partial.mkdir(mode=0o700, exist_ok=True)
    _check_owner(spot.partial)
    room = measure_free_space(spot.partial, memory_left)
    check_free_space(stock.subtract(_measure_folder(spot.partial)), room, spot.folder.parent, inventory.title)
    copy_files(inventory.iter_files(), spot.partial, stock.num_bytes, progress)
    sync_filesystem(spot.partial)
    spot.partial.rename(spot.folder)


def _is_complete(spot: _CopyPaths, inventory: FileInventory) -> bool:
    if not spot.folder.is_dir():
        return False
    _check_owner(spot.folder)
    return is_copy_complete(inventory.iter_files(), spot.folder)


def _is_in_use(spot: _CopyPaths) -> bool:
    lock = acquire_file_lock(spot.lock, is_exclusive=True, should_wait=False)
    if lock is None:
        return True
    lock.close()
    return False


def _wait_for_shared_lock(spot: _CopyPaths, waits: Callable[[], None]) -> FileLock:
    """Wait for a shared lock; `waits` is called regularly while another process copies or removes."""
    try:
        while (lock := acquire_file_lock(spot.lock, is_exclusive=False, should_wait=False)) is None:
            waits()
            threading.Event().wait(_LOCK_POLL_S)
    except OSError as error:
        raise DataError(f"data.stage: {printable(spot.lock)}: {error.strerror} (name another folder)") from error
    return lock


def _remove_stale_copies(wanted: _CopyPaths) -> None:
    for spot in _list_copies(wanted.folder.parent):
        if spot == wanted or spot.keep_marker.exists():
            continue
        with contextlib.suppress(OSError):  # it belongs to another user
            lock = acquire_file_lock(spot.lock, is_exclusive=True, should_wait=False)
            if lock is not None:
                spot.remove(lock)


def _list_copies(top: Path) -> list[_CopyPaths]:
    names = {path.name.partition(".")[0] for path in top.glob(f"{_PREFIX}*")}
    return [_CopyPaths(top / name) for name in sorted(names) if _is_owned_by_user(top / f"{name}.lock")]


def _is_owned_by_user(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False


def _check_owner(folder: Path) -> None:
    """Raise `DataError` for a folder of another user, as in a world-writable place such as /dev/shm."""
    if folder.is_symlink() or not _is_owned_by_user(folder):
        raise DataError(f"data.stage: {printable(folder)} was made by another user (name another folder)")


def _measure_folder(folder: Path) -> CopySize:
    sizes = [(Path(path) / name).lstat().st_size for path, _, names in os.walk(folder) for name in names]
    return CopySize("", len(sizes), sum(sizes), sum(round_to_pages(num_bytes) for num_bytes in sizes))


def _open_stage_folder(where: str, *, make: bool) -> Path:
    top = expand_path(where).absolute()
    try:
        if make:
            top.mkdir(parents=True, exist_ok=True)
        top.stat()
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"data.stage: {printable(top)}: {reason} (name a folder that can be written to)") from None
    return top
