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
from paceline.core.run_dir import checkpoint_name
from paceline.training.checkpoint.format import (
    Snapshot,
    find_damage,
    is_weights_only,
    read_state,
    sync_folder,
    write_checkpoint,
)

DISK_FULL_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a disk without room for a file."""
RESERVED_BYTES: Final = 1 << 16
"""Room that a final checkpoint leaves for `result.json` (about 10 KB) and the logs."""
_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")
_TEMPORARY_NAME = re.compile(r"\.step-\d{8,}\.tmp")
_REPLACED_NAME = re.compile(r"\.(step-\d{8,})\.old")


@dataclass(frozen=True)
class KeepPolicy:
    """Which checkpoints are kept: the `num_newest` ones, the best, and one per `every` steps (0: none)."""

    num_newest: int
    keep_best: bool = True
    every: int = 0

    def __post_init__(self) -> None:
        assert self.num_newest >= 1, "the newest checkpoint is never dropped"

    def is_permanent(self, step: int, best_step: int) -> bool:
        """Return whether the checkpoint of `step` is kept regardless of its age."""
        return (self.keep_best and step == best_step) or (self.every > 0 and step % self.every == 0)


@dataclass(frozen=True)
class CheckpointStorage:
    """Folders `step-00001234` in `folder`, kept according to `policy`."""

    folder: Path
    policy: KeepPolicy

    def save(self, step: int, best_step: int, snapshot: Snapshot, *, reserve: int = 0) -> Path:
        """Write the checkpoint of `step`, delete old ones, and return its folder. Rank 0 only.

        `reserve` bytes of the disk stay free. Raise `OSError` if it cannot be written; other checkpoints are unchanged.
        """
        final, temporary = self.path_of(step), self._temporary_path(step)
        try:
            make_folder(self.folder)  # not the run directory: a new one would hold no run
            _delete(temporary)
            temporary.mkdir()
            self._check_free_space(snapshot.num_bytes + reserve)
            write_checkpoint(temporary, snapshot)
            self._commit(temporary, final)
        except BaseException:
            with contextlib.suppress(OSError):
                self.clean_up()
            raise
        self._delete_old(step, best_step)
        return final

    def save_last(self, step: int, best_step: int, snapshot: Snapshot, *, is_end: bool) -> Path:
        """Save the final checkpoint of a process after `save` ran out of space; return its folder.

        Delete checkpoints that are not permanent, oldest first, but not the newest intact one. If that is not enough
        and training has ended (`is_end`), save only the weights. Raise `OSError` if nothing helps.
        """
        for spare in self._removable(step, best_step):
            _delete(spare)
            with contextlib.suppress(OSError):
                return self.save(step, best_step, snapshot, reserve=RESERVED_BYTES)
        smallest = snapshot.weights_only() if is_end else snapshot
        return self.save(step, best_step, smallest, reserve=RESERVED_BYTES)

    def newest(self) -> Path | None:
        """Return the newest checkpoint, intact or not, or None."""
        checkpoints = self._list()
        return checkpoints[-1] if checkpoints else None

    def last(self) -> Path:
        """Return the newest checkpoint, intact or not. Raise `CheckpointError` if there is none."""
        newest = self.newest()
        if newest is None:
            raise CheckpointError(f"{self.folder}: holds no checkpoint (train with checkpoint.every set)")
        return newest

    def newest_intact(self, warn: Callable[[str], None]) -> Path | None:
        """Return the newest intact checkpoint, or None without any. Call `clean_up` before.

        Damaged ones are skipped with a warning, and so are those of weights alone, if an older one is complete. Raise
        `CheckpointError` if all are damaged, or if the newest intact one has another format.
        """
        checkpoints = self._list()
        weights_only: list[Path] = []
        for path in reversed(checkpoints):
            damage = find_damage(path)
            if not damage:
                # Raises for another format: an older checkpoint would lose progress.
                if not is_weights_only(path):
                    for skipped in weights_only:
                        warn(f"{skipped}: has only the weights, as the disk was full; it is skipped for {path.name}")
                    return path
                weights_only.append(path)
                continue
            warn(f"{damage}; it is skipped")
        if weights_only:
            return weights_only[0]
        if checkpoints:
            raise CheckpointError(f"{self.folder}: none of its checkpoints is intact (remove the folder to start over)")
        return None

    def best(self) -> Path:
        """Return the checkpoint of the best evaluation. Raise `CheckpointError` if there is none."""
        last = self.last()
        step = read_state(last).get("train", {}).get("best_step")
        if type(step) is not int:
            raise CheckpointError(f"{last}: best_step: {step!r:.40} is not a step (use last, or a step)")
        if not self.path_of(step).is_dir():
            at = f"step {step}" if step >= 0 else "no step: nothing was evaluated"
            raise CheckpointError(f"{self.folder}: the best was at {at}, which was not saved (use last, or a step)")
        return self.path_of(step)

    def at_step(self, step: int) -> Path:
        """Return the checkpoint of `step`. Raise `CheckpointError` if it does not exist."""
        path = self.path_of(step)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such checkpoint (see {self.folder})")
        return path

    def by_name(self, name: str) -> Path:
        """Return the checkpoint `last`, `best` or of a step number. Raise `CheckpointError` as these do."""
        match name:
            case "last":
                return self.last()
            case "best":
                return self.best()
        if not name.isdecimal():
            raise RecipeError(f"--checkpoint: {name!r} is not a checkpoint (write last, best or a step's number)")
        return self.at_step(int(name))

    def path_of(self, step: int) -> Path:
        """Return the path for the checkpoint of `step`."""
        return self.folder / checkpoint_name(step)

    def clean_up(self) -> None:
        """Remove leftovers of killed saves. Rank 0 only, while nothing is saved. Raise `OSError` if that fails."""
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else []:
            replaced = _REPLACED_NAME.fullmatch(path.name)
            if replaced and not os.path.lexists(self.folder / replaced[1]):
                path.replace(self.folder / replaced[1])  # killed between the two renames of `_commit`
            elif replaced or _TEMPORARY_NAME.fullmatch(path.name):
                _delete(path)

    def _list(self) -> list[Path]:
        """Return all checkpoints, oldest first, including links, which are refused later."""
        paths = self.folder.iterdir() if self.folder.is_dir() else []
        named = (path for path in paths if _CHECKPOINT_NAME.fullmatch(path.name))
        return sorted((path for path in named if path.is_symlink() or path.is_dir()), key=_step_from_name)

    def _temporary_path(self, step: int) -> Path:
        return self.folder / f".{self.path_of(step).name}.tmp"

    def _check_free_space(self, num_bytes: int) -> None:
        """Raise `OSError` before the disk is completely full, which would fail other writes too."""
        usage = shutil.disk_usage(self.folder)
        if usage.total > 0 and usage.free < num_bytes:  # some network file systems report 0 of 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))

    def _commit(self, temporary: Path, final: Path) -> None:
        # Two renames, since a non-empty folder cannot be replaced; `clean_up` repairs a kill between them.
        replaced = self.folder / f".{final.name}.old"
        _delete(replaced)
        if os.path.lexists(final):
            final.replace(replaced)
        temporary.replace(final)
        sync_folder(self.folder)
        _delete(replaced)

    def _removable(self, step: int, best_step: int) -> list[Path]:
        """Return the checkpoints before `step` that may be deleted, oldest first."""
        past = [path for path in self._list() if _step_from_name(path) < step and not path.is_symlink()]
        newest_intact = next((path for path in reversed(past) if not find_damage(path)), None)
        return [
            path
            for path in past
            if path != newest_intact and not self.policy.is_permanent(_step_from_name(path), best_step)
        ]

    def _delete_old(self, step: int, best_step: int) -> None:
        """Delete the checkpoints that `policy` does not keep; failures are retried after the next save."""
        # Newer checkpoints, skipped as damaged, neither count nor are deleted: the run will replace them.
        past = [path for path in self._list() if _step_from_name(path) <= step]
        for path in past[: -self.policy.num_newest]:
            if not self.policy.is_permanent(_step_from_name(path), best_step):
                temporary = self._temporary_path(_step_from_name(path))
                with contextlib.suppress(OSError):
                    _delete(temporary)
                    path.replace(temporary)  # atomic, so that a partial folder is never taken for a checkpoint
                    _delete(temporary)


def _step_from_name(path: Path) -> int:
    match = _CHECKPOINT_NAME.fullmatch(path.name)
    assert match, f"{path} is no checkpoint's name"
    return int(match[1])


def _delete(path: Path) -> None:
    """Remove a folder tree, a file, or a link without its target. Raise `OSError`."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
