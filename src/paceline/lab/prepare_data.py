"""Convert the dataset of a recipe to another format once, for all trials that read it, and time the conversion."""

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
from paceline.core.experiments.task_lock import exclusive_lock
from paceline.core.json_file import read_json
from paceline.core.run_dir import LOCK, write_atomic
from paceline.core.units import size
from paceline.data.convert.lmdb_writer import write_lmdb
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.files import printable
from paceline.data.sources.build import build_datasets
from paceline.data.sources.fingerprint import digest_datasets
from paceline.lab.dataset_stats import estimate_source_bytes
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.source import Lmdb, Pack

DataForm = Literal["pack", "pack-256", "lmdb"]
"""Formats: a pack; a pack with short sides of at most 256 px at JPEG quality 90; an LMDB of the original files."""
_FILE_NAMES: Final[dict[DataForm, str]] = {"pack": "source.pack", "pack-256": "source-256.pack", "lmdb": "source.lmdb"}
_SHORT_SIDE, _QUALITY = 256, 90
_SPACE_FACTOR: Final = 1.2
"""Space as a multiple of the source's bytes: JPEG indexes and half-full B-tree pages need extra space."""


@dataclass(frozen=True)
class PreparedData:
    """Prepared data: the section that reads them, the seconds of the conversion, and their bytes.

    If they existed (`is_reused`), `seconds` are those of the earlier conversion.
    """

    section: Pack | Lmdb
    seconds: float
    num_bytes: int
    is_reused: bool = False


def _ignore_progress(*values: object) -> None:
    """Ignore progress."""


def prepare_data(
    form: DataForm,
    data: Data,
    folder: Path,
    *,
    workers: int,
    now: Callable[[], float],
    progress: Callable[[int, int], None] = _ignore_progress,
    on_wait: Callable[[], None] = _ignore_progress,
) -> PreparedData:
    """Convert `data.source` in `folder` with `workers` threads, or return existing complete data.

    `now` returns seconds, `progress` gets the images done and in all, and `on_wait` is called if another process is
    converting. Raise `DataError` if the source cannot be read or the disk is too full, and `RecipeError` if the format
    does not apply to the source.
    """
    skip_bad = data.on_bad_image == "skip"
    datasets = build_datasets(data.source, may_download=True, skip_bad=skip_bad)
    if isinstance(datasets.train, ArraySource):
        raise RecipeError(
            f"data.source.name: {data.source.name} is held in memory as pixels, so a ladder cannot convert it to "
            f"{form} (use a folder of image files)"
        )
    out = folder.absolute() / _FILE_NAMES[form]
    section = Lmdb(root=str(out)) if form == "lmdb" else Pack(root=str(out))
    digest = digest_datasets(datasets)
    folder.mkdir(parents=True, exist_ok=True)
    # Of several processes that need the same data the first converts, and the others wait. A resumed experiment reuses
    # complete data and converts again what is incomplete; it removes the folder at its end.
    # Look for existing data under the lock only: network file systems cache that a file does not exist.
    with exclusive_lock(folder / LOCK, on_wait):
        known = _read_existing(section, digest)
        if known is not None:
            return known
        _remove_existing(out)
        _check_disk_space(datasets, folder)
        start_s = now()
        if form == "lmdb":
            write_lmdb(datasets, out, progress, skip_bad=skip_bad, workers=workers)
        else:
            short_side = _SHORT_SIDE if form == "pack-256" else None
            options = PackOptions(resize=short_side, quality=_QUALITY, skip_bad=skip_bad)
            write_pack(datasets, out, options, progress, workers)
        prepared = PreparedData(section, now() - start_s, _measure_bytes(out))
        digests = {"made_from": digest, "digest": _compute_digest(section)}
        record = {**digests, "seconds": prepared.seconds, "bytes": prepared.num_bytes}
        # The record comes last: data without it is incomplete.
        write_atomic(_get_record_path(out), json.dumps(record) + "\n")
        return prepared


def _read_existing(section: Pack | Lmdb, digest: str) -> PreparedData | None:
    # A writer renames its file when complete, and the record is written after that.
    out = Path(section.root)
    try:
        record: dict[str, Any] = read_json(_get_record_path(out))
        if record["made_from"] != digest or record["digest"] != _compute_digest(section):
            return None
        return PreparedData(section, float(record["seconds"]), int(record["bytes"]), is_reused=True)
    except (OSError, ValueError, KeyError, TypeError, PacelineError):
        return None


def _compute_digest(section: Pack | Lmdb) -> str:
    # The source's own digest, unless the conversion changed images.
    return digest_datasets(build_datasets(section, may_download=False))


def _remove_existing(out: Path) -> None:
    for path in (out, _get_record_path(out), *(out.with_name(f".{out.name}.{end}") for end in ("part", "partial"))):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check_disk_space(datasets: Datasets, folder: Path) -> None:
    needed = sum(estimate_source_bytes(source) or 0 for source in (datasets.train, datasets.val)) * _SPACE_FACTOR
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{printable(folder)}: has {size(free)} free, and another format of the data takes up to {size(needed)} "
            f"(make room, or name a --run-dir on another disk)"
        )


def _measure_bytes(out: Path) -> int:
    files = [Path(top, name) for top, _, names in os.walk(out) for name in names] if out.is_dir() else [out]
    return sum(path.stat().st_blocks * 512 for path in files)  # an LMDB may have holes


def _get_record_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.json")
