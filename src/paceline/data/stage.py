"""Copy what a source reads from into memory or to a local disk: once a node, whole or not at all, and not for good.

A copy is a folder `paceline-stage-DIGEST`, where the digest is of every file's path, size and time: a source that has
changed has another copy. It is made under another name, `.tmp` behind it, and renamed when it is whole, so that a kill
leaves nothing that is taken for a copy, and the next run goes on with what is there. Beside it lies a lock: alone to
whoever copies or removes, shared by those who read, until they end in whatever way. The last one removes the copy; what
dead runs have left, the next one does, unless it wants the same. `.kept` beside it says that it is to stay.
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
    """Say nothing of how far copying is."""


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
    """Return the context in which a copy of what `section` reads from stands in folder `where`; give its section.

    The first process of a node copies, before the others come, which find it; each holds it until it leaves. `off` is
    nowhere: the section itself. `skip_bad` is as for `build_datasets`; `memory_left` gives the bytes that the control
    group of this process may still use; `progress` is told bytes done and in all, and may raise to end the work.
    Raise `DataError` where there is no room, nothing to copy, or a file that cannot be.
    """
    if where == "off":
        yield section
        return
    inventory = take_inventory(section, skip_bad=skip_bad)
    stock = inventory.take_stock()
    spot = _Spot(_top(where, make=True) / f"{_PREFIX}{stock.digest}")
    lease = _copied(spot, inventory, stock, memory_left, progress) if is_first else _found(spot, inventory, progress)
    try:
        yield inventory.section_at(spot.folder)
    finally:
        if lease.becomes_alone() and lease.stands and not spot.kept.exists():
            spot.remove(lease)
        lease.close()


def stage_for_keeps(
    section: SourceSection,
    where: Path,
    progress: Progress = quiet,
    *,
    memory_left: Callable[[], float] = memory_left_bytes,
) -> Path:
    """Copy what `section` reads from to folder `where`, where it stays until `unstage`; return the copy's folder.

    A run with that `data.stage` uses it as it is. Raise `DataError` as `staged` does.
    """
    inventory = take_inventory(section)
    stock = inventory.take_stock()
    spot = _Spot(_top(str(where), make=True) / f"{_PREFIX}{stock.digest}")
    with contextlib.closing(_copied(spot, inventory, stock, memory_left, progress)):
        os.close(open_lock_file(spot.kept, 0o600))
    return spot.folder


def section_of(section: SourceSection, copy: Path) -> SourceSection:
    """Return `section` as it is for the folder that `stage_for_keeps` has returned."""
    return take_inventory(section).section_at(copy)


def unstage(where: Path) -> tuple[Path, ...]:
    """Remove all copies in `where`, kept ones too; return them. Raise `DataError` for one that is in use."""
    removed = []
    for spot in _spots(_top(str(where), make=False)):
        lease = take(spot.lock, alone=True, wait=False)
        if lease is None:
            raise DataError(f"{printable(spot.folder)}: is in use by a run (wait until it has ended)")
        spot.remove(lease)
        removed.append(spot.folder)
    return tuple(removed)


@dataclass(frozen=True)
class _Spot:
    """Where a copy lies when it is whole, and what lies beside it."""

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
        """Make a whole copy a partial one: from then on nobody takes it for whole."""
        with contextlib.suppress(FileNotFoundError):
            self.folder.rename(self.partial)

    def remove(self, lease: Lease) -> None:
        """Remove all of it; `lease` is this process's alone."""
        self.unmake()
        shutil.rmtree(self.partial, ignore_errors=True)
        self.kept.unlink(missing_ok=True)
        lease.remove()


def _copied(
    spot: _Spot, inventory: Inventory, stock: Stock, memory_left: Callable[[], float], progress: Progress
) -> Lease:
    """Return a shared lock on a whole copy, which is made where there is none."""
    _remove_stale(spot)
    while True:
        lease = _shared(spot, lambda: progress(0, stock.num_bytes))
        if _is_whole(spot, inventory):
            return lease
        if lease.becomes_alone() and lease.stands:
            try:
                _make(spot, inventory, stock, memory_left, progress)
                lease.becomes_shared()
            except BaseException as error:
                spot.remove(lease)
                if isinstance(error, OSError):
                    raise DataError(f"data.stage: {printable(spot.folder)}: {error.strerror} (name another)") from error
                raise
            if lease.stands and spot.folder.is_dir():
                return lease
        lease.close()
        if spot.folder.is_dir() and not _is_whole(spot, inventory) and _is_used(spot):
            raise DataError(f"{printable(spot.folder)}: lacks files and is in use by another run (wait until it ends)")


def _found(spot: _Spot, inventory: Inventory, progress: Progress) -> Lease:
    """Return a shared lock on the copy that another process of this node has made."""
    lease = _shared(spot, lambda: progress(0, 0))
    if spot.folder.is_dir():
        return lease
    lease.close()
    raise DataError(f"{inventory.title}: changed while it was staged (start again when it is at rest)")


def _make(
    spot: _Spot, inventory: Inventory, stock: Stock, memory_left: Callable[[], float], progress: Progress
) -> None:
    """Copy into the partial folder, go on with what is in it, and rename it when it is whole and on its medium."""
    spot.unmake()  # what was whole lacks something
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
    lease = take(spot.lock, alone=True, wait=False)
    if lease is None:
        return True
    lease.close()
    return False


def _shared(spot: _Spot, waits: Callable[[], None]) -> Lease:
    """Return a shared lock; `waits` is called now and then while another process copies or removes."""
    try:
        while (lease := take(spot.lock, alone=False, wait=False)) is None:
            waits()
            threading.Event().wait(_LOOK_S)
    except OSError as error:
        raise DataError(f"data.stage: {printable(spot.lock)}: {error.strerror} (name another folder)") from error
    return lease


def _remove_stale(wanted: _Spot) -> None:
    """Remove what runs that have died have left in the same folder, but for what is wanted or kept."""
    for spot in _spots(wanted.folder.parent):
        if spot == wanted or spot.kept.exists():
            continue
        with contextlib.suppress(OSError):  # another user's
            lease = take(spot.lock, alone=True, wait=False)
            if lease is not None:
                spot.remove(lease)


def _spots(top: Path) -> list[_Spot]:
    names = {path.name.partition(".")[0] for path in top.glob(f"{_PREFIX}*")}
    return [_Spot(top / name) for name in sorted(names) if _is_ours(top / f"{name}.lock")]


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False


def _refuse_others(folder: Path) -> None:
    """Raise `DataError` for a folder that somebody else has put there, in a place that is anybody's to write to."""
    if folder.is_symlink() or not _is_ours(folder):
        raise DataError(f"data.stage: {printable(folder)} was made by another user (name another folder)")


def _held(folder: Path) -> Stock:
    """Return what lies in `folder`, by the space that it takes there."""
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
