"""The checkpoints of a run: one folder each, whole or not there at all, and which of them stay.

A checkpoint is written beside its final name and moved into place, so a kill at any moment leaves the previous one.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.errors import CheckpointError, RecipeError
from paceline.core.files import make_folder
from paceline.core.rundir import checkpoint_name
from paceline.train.checkpoint.format import Snapshot, damage_of, read_state, sync_folder, write

FULL_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What a disk says that has no room for a file."""
RESERVED_BYTES: Final = 1 << 16
"""Room that a last checkpoint leaves for `result.json` and the logs; a result takes about 10 KB."""
_NAME = re.compile(r"step-(\d{8,})")
_BEING_MADE = re.compile(r"\.step-\d{8,}\.tmp")
_REPLACED = re.compile(r"\.(step-\d{8,})\.old")


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: the `newest` ones, that of the best evaluation, and one each `every` steps (0: none)."""

    newest: int
    best: bool = True
    every: int = 0

    def __post_init__(self) -> None:
        assert self.newest >= 1, "the newest checkpoint is never dropped"

    def for_good(self, step: int, best_step: int) -> bool:
        """Return whether the checkpoint of `step` stays however old it is."""
        return (self.best and step == best_step) or (self.every > 0 and step % self.every == 0)


@dataclass(frozen=True)
class Checkpoints:
    """Folders `step-00001234` in `folder`, of which `keep` says which stay."""

    folder: Path
    keep: Keep

    def save(self, step: int, best_step: int, snapshot: Snapshot, *, reserve: int = 0) -> Path:
        """Write the checkpoint of `step`, drop old ones, and return its folder. Only rank 0 calls it.

        `reserve` bytes of the disk stay free. Raise `OSError` when it cannot be written; nothing of it is left then,
        and all others are as they were.
        """
        final, beside = self.path_of(step), self._beside(step)
        try:
            make_folder(self.folder)  # the run's own folder is not made again: it would hold no run
            _remove(beside)
            beside.mkdir()
            self._refuse_full_disk(snapshot.num_bytes + reserve)
            write(beside, snapshot)
            self._commit(beside, final)
        except BaseException:
            with contextlib.suppress(OSError):
                self.tidy()
            raise
        self._drop_old(step, best_step)
        return final

    def save_last(self, step: int, best_step: int, snapshot: Snapshot, *, is_end: bool) -> Path:
        """Save the last checkpoint of a process, for which `save` has found no room; return its folder.

        Checkpoints that are not kept for good make room, the oldest first, but never the newest whole one. Where that
        is not enough and training has ended (`is_end`), the weights are saved alone. Raise `OSError` where nothing
        helps.
        """
        for spare in self._spare(step, best_step):
            _remove(spare)
            with contextlib.suppress(OSError):
                return self.save(step, best_step, snapshot, reserve=RESERVED_BYTES)
        kept = snapshot.weights_alone() if is_end else snapshot
        return self.save(step, best_step, kept, reserve=RESERVED_BYTES)

    def newest(self) -> Path | None:
        """Return the newest checkpoint, whole or not, or None."""
        found = self._all()
        return found[-1] if found else None

    def last(self) -> Path:
        """Return the newest checkpoint, whole or not. Raise `CheckpointError` when there is none."""
        newest = self.newest()
        if newest is None:
            raise CheckpointError(f"{self.folder}: holds no checkpoint (train with checkpoint.every set)")
        return newest

    def newest_whole(self, warn: Callable[[str], None]) -> Path | None:
        """Return the newest checkpoint that is not damaged, or None where there are none. Call `tidy` before.

        Each damaged one that is stepped over is one warning. Raise `CheckpointError` where all are damaged, and for a
        whole one of another format, which is no damage: an older one in its place would lose what it holds.
        """
        found = self._all()
        for path in reversed(found):
            damage = damage_of(path)
            if not damage:
                read_state(path)
                return path
            warn(f"{damage}; it is stepped over")
        if found:
            raise CheckpointError(f"{self.folder}: none of its checkpoints is whole (remove the folder to start over)")
        return None

    def best(self) -> Path:
        """Return the checkpoint of the best evaluation, as the newest one knows it.

        Raise `CheckpointError` when there is none.
        """
        last = self.last()
        step = read_state(last).get("train", {}).get("best_step")
        if type(step) is not int:
            raise CheckpointError(f"{last}: best_step: {step!r:.40} is no step (use last, or a step)")
        if not self.path_of(step).is_dir():
            at = f"step {step}" if step >= 0 else "no step: nothing was evaluated"
            raise CheckpointError(f"{self.folder}: the best was at {at}, which was not saved (use last, or a step)")
        return self.path_of(step)

    def at(self, step: int) -> Path:
        """Return the checkpoint of `step`. Raise `CheckpointError` when it is not there."""
        path = self.path_of(step)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such checkpoint (see {self.folder})")
        return path

    def named(self, name: str) -> Path:
        """Return the checkpoint called `last`, `best` or by its step's number. Raise `CheckpointError` as these do."""
        match name:
            case "last":
                return self.last()
            case "best":
                return self.best()
        if not name.isdecimal():
            raise RecipeError(f"--checkpoint: {name!r} is not a checkpoint (write last, best or a step's number)")
        return self.at(int(name))

    def path_of(self, step: int) -> Path:
        """Return where the checkpoint of `step` is, or would be."""
        return self.folder / checkpoint_name(step)

    def tidy(self) -> None:
        """Remove what killed saves have left. Only rank 0 calls it, while nothing is being saved.

        Raise `OSError` where it cannot be removed.
        """
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else []:
            replaced = _REPLACED.fullmatch(path.name)
            if replaced and not os.path.lexists(self.folder / replaced[1]):
                path.replace(self.folder / replaced[1])  # killed between moving it away and putting the new one there
            elif replaced or _BEING_MADE.fullmatch(path.name):
                _remove(path)

    def _all(self) -> list[Path]:
        """Return what is there, oldest first; links too, so that one is refused rather than overlooked."""
        found = self.folder.iterdir() if self.folder.is_dir() else []
        named = (path for path in found if _NAME.fullmatch(path.name))
        return sorted((path for path in named if path.is_symlink() or path.is_dir()), key=_step_of)

    def _beside(self, step: int) -> Path:
        return self.folder / f".{self.path_of(step).name}.tmp"

    def _refuse_full_disk(self, num_bytes: int) -> None:
        """Raise `OSError` before a disk is filled to the last byte, which would fail all else that is written there."""
        usage = shutil.disk_usage(self.folder)
        if usage.total > 0 and usage.free < num_bytes:  # some network file systems say 0 of 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))

    def _commit(self, beside: Path, final: Path) -> None:
        replaced = self.folder / f".{final.name}.old"
        _remove(replaced)
        if os.path.lexists(final):
            final.replace(replaced)
        beside.replace(final)
        sync_folder(self.folder)
        _remove(replaced)

    def _spare(self, step: int, best_step: int) -> list[Path]:
        """Return the checkpoints before `step` that may go, oldest first: none for good, nor the newest whole one."""
        past = [path for path in self._all() if _step_of(path) < step and not path.is_symlink()]
        whole = next((path for path in reversed(past) if not damage_of(path)), None)
        return [path for path in past if path != whole and not self.keep.for_good(_step_of(path), best_step)]

    def _drop_old(self, step: int, best_step: int) -> None:
        """Drop what `keep` does not keep as of `step`; one that cannot be removed is tried again after the next save.

        Newer ones, which were stepped over as damaged, neither count nor are dropped: the run will come past them.
        """
        past = [path for path in self._all() if _step_of(path) <= step]
        for path in past[: -self.keep.newest]:
            if not self.keep.for_good(_step_of(path), best_step):
                beside = self._beside(_step_of(path))
                with contextlib.suppress(OSError):
                    _remove(beside)
                    path.replace(beside)  # at once, so that no half of it is ever taken for a checkpoint
                    _remove(beside)


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match, f"{path} is no checkpoint's name"
    return int(match[1])


def _remove(path: Path) -> None:
    """Remove a folder with all in it, a file, or a link but never what it points to. Raise `OSError`."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
