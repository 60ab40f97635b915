"""The checkpoints of a run, one folder each, and which of them are kept.

A checkpoint is written under a temporary name and then renamed, so a kill at any moment leaves the previous one intact.
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
"""Errors of a disk without room for a file."""
RESERVED_BYTES: Final = 1 << 16
"""Room that a final checkpoint leaves for `result.json` (about 10 KB) and the logs."""
_NAME = re.compile(r"step-(\d{8,})")
_BEING_MADE = re.compile(r"\.step-\d{8,}\.tmp")
_REPLACED = re.compile(r"\.(step-\d{8,})\.old")


@dataclass(frozen=True)
class Keep:
    """Which checkpoints are kept: the `newest` ones, the best, and one per `every` steps (0: none)."""

    newest: int
    best: bool = True
    every: int = 0

    def __post_init__(self) -> None:
        assert self.newest >= 1, "the newest checkpoint is never dropped"

    def for_good(self, step: int, best_step: int) -> bool:
        """Return whether the checkpoint of `step` is kept regardless of its age."""
        return (self.best and step == best_step) or (self.every > 0 and step % self.every == 0)


@dataclass(frozen=True)
class Checkpoints:
    """Folders `step-00001234` in `folder`, kept according to `keep`."""

    folder: Path
    keep: Keep

    def save(self, step: int, best_step: int, snapshot: Snapshot, *, reserve: int = 0) -> Path:
        """Write the checkpoint of `step`, delete old ones, and return its folder. Rank 0 only.

        `reserve` bytes of the disk stay free. Raise `OSError` if it cannot be written; then all other checkpoints are
        unchanged.
        """
        final, temporary = self.path_of(step), self._beside(step)
        try:
            make_folder(self.folder)  # not the run directory: a new one would hold no run
            _remove(temporary)
            temporary.mkdir()
            self._refuse_full_disk(snapshot.num_bytes + reserve)
            write(temporary, snapshot)
            self._commit(temporary, final)
        except BaseException:
            with contextlib.suppress(OSError):
                self.tidy()
            raise
        self._drop_old(step, best_step)
        return final

    def save_last(self, step: int, best_step: int, snapshot: Snapshot, *, is_end: bool) -> Path:
        """Save the final checkpoint of a process after `save` ran out of space; return its folder.

        Checkpoints that are not permanent are deleted, oldest first, except for the newest intact one. If that is not
        enough and training has ended (`is_end`), only the weights are saved. Raise `OSError` if nothing helps.
        """
        for spare in self._spare(step, best_step):
            _remove(spare)
            with contextlib.suppress(OSError):
                return self.save(step, best_step, snapshot, reserve=RESERVED_BYTES)
        smallest = snapshot.weights_alone() if is_end else snapshot
        return self.save(step, best_step, smallest, reserve=RESERVED_BYTES)

    def newest(self) -> Path | None:
        """Return the newest checkpoint, intact or not, or None."""
        checkpoints = self._all()
        return checkpoints[-1] if checkpoints else None

    def last(self) -> Path:
        """Return the newest checkpoint, intact or not. Raise `CheckpointError` if there is none."""
        newest = self.newest()
        if newest is None:
            raise CheckpointError(f"{self.folder}: holds no checkpoint (train with checkpoint.every set)")
        return newest

    def newest_whole(self, warn: Callable[[str], None]) -> Path | None:
        """Return the newest intact checkpoint, or None without any. Call `tidy` before.

        Each damaged one that is skipped gives a warning. Raise `CheckpointError` if all are damaged, or if an intact
        one has another format: an older one would lose its progress.
        """
        checkpoints = self._all()
        for path in reversed(checkpoints):
            damage = damage_of(path)
            if not damage:
                read_state(path)
                return path
            warn(f"{damage}; it is skipped")
        if checkpoints:
            raise CheckpointError(f"{self.folder}: none of its checkpoints is intact (remove the folder to start over)")
        return None

    def best(self) -> Path:
        """Return the checkpoint of the best evaluation, according to the newest one.

        Raise `CheckpointError` if there is none.
        """
        last = self.last()
        step = read_state(last).get("train", {}).get("best_step")
        if type(step) is not int:
            raise CheckpointError(f"{last}: best_step: {step!r:.40} is not a step (use last, or a step)")
        if not self.path_of(step).is_dir():
            at = f"step {step}" if step >= 0 else "no step: nothing was evaluated"
            raise CheckpointError(f"{self.folder}: the best was at {at}, which was not saved (use last, or a step)")
        return self.path_of(step)

    def at(self, step: int) -> Path:
        """Return the checkpoint of `step`. Raise `CheckpointError` if it does not exist."""
        path = self.path_of(step)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such checkpoint (see {self.folder})")
        return path

    def named(self, name: str) -> Path:
        """Return the checkpoint `last`, `best` or of a step number. Raise `CheckpointError` as these do."""
        match name:
            case "last":
                return self.last()
            case "best":
                return self.best()
        if not name.isdecimal():
            raise RecipeError(f"--checkpoint: {name!r} is not a checkpoint (write last, best or a step's number)")
        return self.at(int(name))

    def path_of(self, step: int) -> Path:
        """Return the path for the checkpoint of `step`."""
        return self.folder / checkpoint_name(step)

    def tidy(self) -> None:
        """Remove leftovers of killed saves. Rank 0 only, while nothing is saved. Raise `OSError` if that fails."""
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else []:
            replaced = _REPLACED.fullmatch(path.name)
            if replaced and not os.path.lexists(self.folder / replaced[1]):
                path.replace(self.folder / replaced[1])  # killed between the two renames of `_commit`
            elif replaced or _BEING_MADE.fullmatch(path.name):
                _remove(path)

    def _all(self) -> list[Path]:
        """Return all checkpoints, oldest first, including links, which are refused later."""
        paths = self.folder.iterdir() if self.folder.is_dir() else []
        named = (path for path in paths if _NAME.fullmatch(path.name))
        return sorted((path for path in named if path.is_symlink() or path.is_dir()), key=_step_of)

    def _beside(self, step: int) -> Path:
        return self.folder / f".{self.path_of(step).name}.tmp"

    def _refuse_full_disk(self, num_bytes: int) -> None:
        """Raise `OSError` before the disk is completely full, which would fail other writes too."""
        usage = shutil.disk_usage(self.folder)
        if usage.total > 0 and usage.free < num_bytes:  # some network file systems report 0 of 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))

    def _commit(self, temporary: Path, final: Path) -> None:
        replaced = self.folder / f".{final.name}.old"
        _remove(replaced)
        if os.path.lexists(final):
            final.replace(replaced)
        temporary.replace(final)
        sync_folder(self.folder)
        _remove(replaced)

    def _spare(self, step: int, best_step: int) -> list[Path]:
        """Return the checkpoints before `step` that may be deleted, oldest first."""
        past = [path for path in self._all() if _step_of(path) < step and not path.is_symlink()]
        newest_intact = next((path for path in reversed(past) if not damage_of(path)), None)
        return [path for path in past if path != newest_intact and not self.keep.for_good(_step_of(path), best_step)]

    def _drop_old(self, step: int, best_step: int) -> None:
        """Delete the checkpoints that `keep` does not keep as of `step`; failures are retried after the next save."""
        # Newer checkpoints, skipped as damaged, neither count nor are deleted: the run will replace them.
        past = [path for path in self._all() if _step_of(path) <= step]
        for path in past[: -self.keep.newest]:
            if not self.keep.for_good(_step_of(path), best_step):
                temporary = self._beside(_step_of(path))
                with contextlib.suppress(OSError):
                    _remove(temporary)
                    path.replace(temporary)  # atomic, so that a partial folder is never taken for a checkpoint
                    _remove(temporary)


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match, f"{path} is no checkpoint's name"
    return int(match[1])


def _remove(path: Path) -> None:
    """Remove a folder tree, a file, or a link without its target. Raise `OSError`."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
