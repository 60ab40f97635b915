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
from paceline.core.limits import memory_left_bytes
from paceline.data.lease import Lease, take
from paceline.data.sources.places import expanded, printable
from paceline.data.staging.copying import Progress, copy_files, is_copied
from paceline.data.staging.flush import flush
from paceline.data.staging.inventory import Inventory, Stock, paged, take_inventory
from paceline.data.staging.room import check_room, room_in
from paceline.recipe.schema.source import SourceSection

_PREFIX: Final = "paceline-stage-"
_LOOK_S: Final = 0.2


def quiet(done_bytes: int, num_bytes: int) -> None:
    """Ignore progress."""


@contextlib.contextmanager
def staged(
    section: SourceSection,
    where: str,
    *,
    is_first: bool,
    skip_bad: bool = False,
    memory_left: Callable[[], float] = memory_left_bytes,
    progress: Progress = quiet,
) -> Iterator[SourceSection]:
    """Yield `section` changed to read from a copy of its files in folder `where`; `off` yields it unchanged.

    The first process of a node copies, the others then find the copy; each holds a lock until it exits. `skip_bad` is
    as for `build_datasets`; `memory_left` returns the bytes that this process's control group may still use; `progress`
    receives bytes done and in total, and may raise to cancel. Raise `DataError` if there is no space, nothing to copy,
    or a file that cannot be copied.
    """
    if where == "off":
        yield section
        return
    inventory = take_inventory(section, skip_bad=skip_bad)
    stock = inventory.take_stock()
    spot = _Spot(_top(where, make=True) / f"{_PREFIX}{stock.digest}")
    lock = _copied(spot, inventory, stock, memory_left, progress) if is_first else _found(spot, inventory, progress)
    try:
        yield inventory.section_at(spot.folder)
    finally:
        if lock.becomes_alone() and lock.stands and not spot.kept.exists():
            spot.remove(lock)
        lock.close()


def stage_for_keeps(
    section: SourceSection,
    where: Path,
    progress: Progress = quiet,
    *,
    memory_left: Callable[[], float] = memory_left_bytes,
) -> Path:
    """Copy what `section` reads to folder `where`, where it stays until `unstage`; return the copy's folder.

    A run with the same `data.stage` uses it. Raise `DataError` as `staged` does.
    """
    inventory = take_inventory(section)
    stock = inventory.take_stock()
    spot = _Spot(_top(str(where), make=True) / f"{_PREFIX}{stock.digest}")
    with contextlib.closing(_copied(spot, inventory, stock, memory_left, progress)):
        os.close(open_lock_file(spot.kept, 0o600))
    return spot.folder


def section_of(section: SourceSection, copy: Path) -> SourceSection:
    """Return `section` changed to read from a folder that `stage_for_keeps` returned."""
    return take_inventory(section).section_at(copy)


def unstage(where: Path) -> tuple[Path, ...]:
    """Remove all copies in `where`, permanent ones included; return them. Raise `DataError` if one is in use."""
    removed = []
    for spot in _spots(_top(str(where), make=False)):
        lock = take(spot.lock, alone=True, wait=False)
        if lock is None:
            raise DataError(f"{printable(spot.folder)}: is in use by a run (wait until the run has ended)")
        spot.remove(lock)
        removed.append(spot.folder)
    return tuple(removed)


@dataclass(frozen=True)
class _Spot:
    folder: Path

    @property
    def partial(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.tmp")

    @property
    def lock(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.lock")

    @property
    def kept(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.kept")

    def unmake(self) -> None:
        """Rename a complete copy to a partial one, so that no process uses it any more."""
        with contextlib.suppress(FileNotFoundError):
            self.folder.rename(self.partial)

    def remove(self, lock: Lease) -> None:
        """Remove all files of the copy; this process must hold `lock` exclusively."""
        self.unmake()
        shutil.rmtree(self.partial, ignore_errors=True)
        self.kept.unlink(missing_ok=True)
        lock.remove()


def _copied(
    spot: _Spot, inventory: Inventory, stock: Stock, memory_left: Callable[[], float], progress: Progress
) -> Lease:
    """Return a shared lock on a complete copy; make the copy if there is none."""
    _remove_stale(spot)
    while True:
        lock = _shared(spot, lambda: progress(0, stock.num_bytes))
        if _is_whole(spot, inventory):
            return lock
        if lock.becomes_alone() and lock.stands:
            try:
                _make(spot, inventory, stock, memory_left, progress)
                lock.becomes_shared()
            except BaseException as error:
                spot.remove(lock)
                if isinstance(error, OSError):
                    raise DataError(f"data.stage: {printable(spot.folder)}: {error.strerror} (name another)") from error
                raise
            if lock.stands and spot.folder.is_dir():
                return lock
        lock.close()
        if spot.folder.is_dir() and not _is_whole(spot, inventory) and _is_used(spot):
            raise DataError(f"{printable(spot.folder)}: lacks files and is in use by another run (wait until it ends)")


def _found(spot: _Spot, inventory: Inventory, progress: Progress) -> Lease:
    lock = _shared(spot, lambda: progress(0, 0))
    if spot.folder.is_dir():
        return lock
    lock.close()
    raise DataError(f"{inventory.title}: changed while it was staged (start again when it no longer changes)")


def _make(
    spot: _Spot, inventory: Inventory, stock: Stock, memory_left: Callable[[], float], progress: Progress
) -> None:
    """Copy into the partial folder, continuing an earlier attempt; rename it once it is complete and flushed."""
    spot.unmake()  # a copy that was complete lacks files
    spot.partial.mkdir(mode=0o700, exist_ok=True)
    _refuse_others(spot.partial)
    room = room_in(spot.partial, memory_left)
    check_room(stock.less(_held(spot.partial)), room, spot.folder.parent, inventory.title)
    copy_files(inventory.entries(), spot.partial, stock.num_bytes, progress)
    flush(spot.partial)
    spot.partial.rename(spot.folder)


def _is_whole(spot: _Spot, inventory: Inventory) -> bool:
    if not spot.folder.is_dir():
        return False
    _refuse_others(spot.folder)
    return is_copied(inventory.entries(), spot.folder)


def _is_used(spot: _Spot) -> bool:
    lock = take(spot.lock, alone=True, wait=False)
    if lock is None:
        return True
    lock.close()
    return False


def _shared(spot: _Spot, waits: Callable[[], None]) -> Lease:
    """Wait for a shared lock; `waits` is called regularly while another process copies or removes."""
    try:
        while (lock := take(spot.lock, alone=False, wait=False)) is None:
            waits()
            threading.Event().wait(_LOOK_S)
    except OSError as error:
        raise DataError(f"data.stage: {printable(spot.lock)}: {error.strerror} (name another folder)") from error
    return lock


def _remove_stale(wanted: _Spot) -> None:
    for spot in _spots(wanted.folder.parent):
        if spot == wanted or spot.kept.exists():
            continue
        with contextlib.suppress(OSError):  # it belongs to another user
            lock = take(spot.lock, alone=True, wait=False)
            if lock is not None:
                spot.remove(lock)


def _spots(top: Path) -> list[_Spot]:
    names = {path.name.partition(".")[0] for path in top.glob(f"{_PREFIX}*")}
    return [_Spot(top / name) for name in sorted(names) if _is_ours(top / f"{name}.lock")]


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False


def _refuse_others(folder: Path) -> None:
    """Raise `DataError` for a folder of another user, as in a world-writable place such as /dev/shm."""
    if folder.is_symlink() or not _is_ours(folder):
        raise DataError(f"data.stage: {printable(folder)} was made by another user (name another folder)")


def _held(folder: Path) -> Stock:
    sizes = [(Path(path) / name).lstat().st_size for path, _, names in os.walk(folder) for name in names]
    return Stock("", len(sizes), sum(sizes), sum(paged(num_bytes) for num_bytes in sizes))


def _top(where: str, *, make: bool) -> Path:
    top = expanded(where).absolute()
    try:
        if make:
            top.mkdir(parents=True, exist_ok=True)
        top.stat()
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"data.stage: {printable(top)}: {reason} (name a folder that can be written to)") from None
    return top
