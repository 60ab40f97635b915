"""Cache features in a folder: one safetensors file per model, preprocessing and images, oldest removed first."""

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch import Tensor

from paceline.core.errors import RecipeError
from paceline.core.files import remove_abandoned
from paceline.inference.tensor_file import read_tensors, write_tensors
from paceline.training.checkpoint import weights_sha256

_NAME: Final = re.compile(r"[0-9a-f]{64}\.safetensors")
_DIGEST: Final = "sha256"


@dataclass(frozen=True)
class FeatureCache:
    """Files `KEY.safetensors` in `folder`, of `max_bytes` in all."""

    folder: Path
    max_bytes: int

    def read(self, key: str) -> dict[str, Tensor] | None:
        """Return the tensors of `key`, or None if they are missing or damaged."""
        path = self._path(key)
        try:
            tensors, digest = read_tensors(path)
            if weights_sha256(tensors) == digest.get(_DIGEST):
                return tensors
        except (OSError, ValueError):
            pass
        return None

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Store the tensors of `key`. Raise `RecipeError` if the folder cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_tensors(self._path(key), tensors, {_DIGEST: weights_sha256(tensors)})
            self._remove_oldest(keep=self._path(key))
        except OSError as error:
            raise RecipeError(f"--cache: {self.folder} cannot be written: {error.strerror} (name another)") from None

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def list_files(self) -> dict[Path, os.stat_result]:
        """Return the files of the cache. Raise `OSError`."""
        files = {}
        for path in self.folder.iterdir():
            if _NAME.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # another probe has removed it
                    files[path] = path.stat()
        return files

    def _remove_oldest(self, keep: Path) -> None:
        remove_abandoned(self.folder)
        used = 0
        for path, stat in sorted(self.list_files().items(), key=lambda item: (item[0] != keep, -item[1].st_mtime)):
            used += stat.st_size
            if used > self.max_bytes and path != keep:
                with contextlib.suppress(OSError):
                    path.unlink()
