"""Convert the dataset of a recipe to another format once, for all trials that read it, and time the conversion.

The data lie in a folder of the experiment, which removes it at its end. A resumed experiment reuses complete data and
converts again what is incomplete. Of several processes that need the same data the first converts, and the others wait.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from paceline.core.dataset import ArraySource, Datasets
from paceline.core.errors import DataError, PacelineError, RecipeError
from paceline.core.experiments.sharing import alone_with
from paceline.core.json_file import read_json
from paceline.core.rundir import write_atomic
from paceline.core.runlock import LOCK
from paceline.core.units import size
from paceline.data.identity import dataset_digest
from paceline.data.pack.writer import PackOptions, pack
from paceline.data.sources.build import build_datasets
from paceline.data.sources.lmdb_write import write_lmdb
from paceline.data.sources.places import printable
from paceline.lab.inspection import source_bytes
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.source import Lmdb, Pack

Form = Literal["pack", "pack-256", "lmdb"]
"""Formats: a pack; a pack with short sides of at most 256 px at JPEG quality 90; an LMDB of the original files."""
_NAMES: Final[dict[Form, str]] = {"pack": "source.pack", "pack-256": "source-256.pack", "lmdb": "source.lmdb"}
_SHORT_SIDE, _QUALITY = 256, 90
_ROOM: Final = 1.2
"""Space as a multiple of the source's bytes: JPEG indexes and half-full B-tree pages need extra space."""


@dataclass(frozen=True)
class Prepared:
    """Prepared data: the section that reads them, the seconds of the conversion, and their bytes.

    `is_known` if they existed already; `seconds` are then those of the earlier conversion.
    """

    section: Pack | Lmdb
    seconds: float
    num_bytes: int
    is_known: bool = False


def _quiet(*values: object) -> None:
    """Ignore progress."""


def prepare(
    form: Form,
    data: Data,
    folder: Path,
    *,
    workers: int,
    now: Callable[[], float],
    progress: Callable[[int, int], None] = _quiet,
    waits: Callable[[], None] = _quiet,
) -> Prepared:
    """Convert `data.source` in `folder` with `workers` threads, or return existing complete data.

    `now` returns seconds, `progress` gets the images done and in all, and `waits` is called if another process is
    converting. Raise `DataError` if the source cannot be read or the disk is too full, and `RecipeError` if the format
    does not apply to the source.
    """
    skip_bad = data.on_bad_image == "skip"
    datasets = build_datasets(data.source, may_download=True, skip_bad=skip_bad)
    _check_form(form, data, datasets)
    out = folder.absolute() / _NAMES[form]
    section = Lmdb(root=str(out)) if form == "lmdb" else Pack(root=str(out))
    digest = dataset_digest(datasets)
    folder.mkdir(parents=True, exist_ok=True)
    # Look for existing data under the lock only: network file systems cache that a file does not exist.
    with alone_with(folder / LOCK, waits):
        known = _known(section, digest)
        if known is not None:
            return known
        _clear(out)
        _check_room(datasets, folder)
        start_s = now()
        _make(form, datasets, out, progress, skip_bad=skip_bad, workers=workers)
        prepared = Prepared(section, now() - start_s, _bytes_of(out))
        record = {
            "made_from": digest,
            "digest": _digest_of(section),
            "seconds": prepared.seconds,
            "bytes": prepared.num_bytes,
        }
        write_atomic(_record_of(out), json.dumps(record) + "\n")
        return prepared


def _make(
    form: Form,
    datasets: Datasets,
    out: Path,
    progress: Callable[[int, int], None],
    *,
    skip_bad: bool,
    workers: int,
) -> None:
    if form == "lmdb":
        write_lmdb(datasets, out, progress, skip_bad=skip_bad, workers=workers)
    else:
        pack(datasets, out, _options(form, skip_bad=skip_bad), progress, workers)


def _options(form: Form, *, skip_bad: bool) -> PackOptions:
    if form == "pack-256":
        return PackOptions(resize=_SHORT_SIDE, quality=_QUALITY, skip_bad=skip_bad)
    return PackOptions(skip_bad=skip_bad)


def _check_form(form: Form, data: Data, datasets: Datasets) -> None:
    if isinstance(datasets.train, ArraySource):
        raise RecipeError(
            f"data.source.name: {data.source.name} is held in memory as pixels, so a ladder cannot convert it to "
            f"{form} (use a folder of image files)"
        )


def _known(section: Pack | Lmdb, digest: str) -> Prepared | None:
    """Return existing data of this source if they are complete, else None."""
    # A writer renames its file when complete, and the record is written after that.
    out = Path(section.root)
    try:
        record: dict[str, Any] = read_json(_record_of(out))
        if record["made_from"] != digest or record["digest"] != _digest_of(section):
            return None
        return Prepared(section, float(record["seconds"]), int(record["bytes"]), is_known=True)
    except (OSError, ValueError, KeyError, TypeError, PacelineError):
        return None


def _digest_of(section: Pack | Lmdb) -> str:
    """Return the digest of prepared data: the source's own, unless images were changed."""
    return dataset_digest(build_datasets(section, may_download=False))


def _clear(out: Path) -> None:
    for path in (out, _record_of(out), *(out.with_name(f".{out.name}.{end}") for end in ("part", "partial"))):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check_room(datasets: Datasets, folder: Path) -> None:
    needed = sum(source_bytes(source) or 0 for source in (datasets.train, datasets.val)) * _ROOM
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{printable(folder)}: has {size(free)} free, and another format of the data takes up to {size(needed)} "
            f"(make room, or name a --run-dir on another disk)"
        )


def _bytes_of(out: Path) -> int:
    files = [Path(top, name) for top, _, names in os.walk(out) for name in names] if out.is_dir() else [out]
    return sum(path.stat().st_blocks * 512 for path in files)  # an LMDB may have holes


def _record_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.json")
