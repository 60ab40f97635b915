"""`paceline data pack`, `unpack` and `stage`: write a data set as a pack, a folder, or a local copy."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from paceline.cli.data_source import count_workers, parse_bytes, read_source, recipe_overrides
from paceline.cli.progress_output import DataProgress, build_data_progress
from paceline.cli.tables import print_rows
from paceline.core.dataset import ArraySource, Datasets
from paceline.core.errors import RecipeError
from paceline.core.units import count, number, seconds, size
from paceline.data.convert.lmdb_writer import write_lmdb
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.convert.unpack import unpack
from paceline.data.files import expand_path, printable
from paceline.data.native import NATIVE_MISSING_MESSAGE, load_native
from paceline.data.sources.build import build_datasets
from paceline.data.staging.stage import build_staged_section, stage_permanently, unstage
from paceline.lab.dataset_stats import estimate_source_bytes
from paceline.recipe.schema.source import Lmdb, Pack, SourceSection

_DEFAULT_QUALITY: Final = 90
_MIN_SHARD_BYTES: Final = 2 * 10**6
"""Bytes. Shards of a few images each would be a folder of files again."""


@dataclass(frozen=True)
class PackRequest:
    """Options of `paceline data pack` as typed; None if omitted."""

    form: str = "pack"
    resize: int | None = None
    quality: int | None = None
    shard_size: str | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class PackSummary:
    """Images, bytes on disk, seconds, source bytes if known, and the section that reads the result.

    `copied` counts images stored as their original files, by reason.
    """

    images: int
    source_bytes: float | None
    bytes: int
    seconds: float
    copied: Mapping[str, int]
    section: SourceSection

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "images": self.images,
            "source_bytes": None if self.source_bytes is None else round(self.source_bytes),
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "kept": dict(self.copied),
            "source": self.section.model_dump(),
        }


def pack_data(
    src: str,
    out: Path,
    overrides: list[str],
    request: PackRequest,
    workers: str,
    *,
    own_code: bool = False,
    as_json: bool,
) -> int:
    """Run `paceline data pack`, and return the exit code."""
    _check_request(request)
    num_workers = count_workers(workers)
    data_request = read_source(src, overrides, own_code=own_code)
    skip_bad = data_request.data.on_bad_image == "skip"
    options = _pack_options(request, skip_bad=skip_bad)
    datasets = build_datasets(data_request.source, may_download=True, skip_bad=skip_bad)
    out = expand_path(str(out)).absolute()  # absolute, because a recipe may be used from another folder
    with build_data_progress("images") as progress:
        if request.form == "lmdb":
            written = _write_lmdb(datasets, out, progress, num_workers, skip_bad=skip_bad)
        else:
            written = _write_pack(datasets, out, options, num_workers, progress)
    if as_json:
        print(json.dumps(written.to_dict(), indent=2))
    else:
        print_rows(list(_summary_rows(datasets, written, request)), printable(out))
        print(f"in a recipe: {recipe_overrides(written.section)}")
    return 0


def _check_request(request: PackRequest) -> None:
    if request.form not in ("pack", "lmdb"):
        raise RecipeError(f"--format: {request.form!r} is not a format (write pack or lmdb)")
    pack_options = {
        "--resize": request.resize,
        "--quality": request.quality,
        "--shard-size": request.shard_size,
        "--overwrite": request.overwrite or None,
    }
    given = next((name for name, value in pack_options.items() if value is not None), None)
    if request.form == "lmdb" and given:
        raise RecipeError(f"{given}: is for packs, and --format is lmdb (leave it out)")
    if request.quality is not None and request.resize is None:
        raise RecipeError("--quality: has no effect without --resize, as no image is re-encoded (add --resize 256)")


def _pack_options(request: PackRequest, *, skip_bad: bool) -> PackOptions:
    shard_bytes = None if request.shard_size is None else parse_bytes(request.shard_size, "--shard-size")
    if shard_bytes is not None and shard_bytes < _MIN_SHARD_BYTES:
        raise RecipeError(f"--shard-size: {request.shard_size} is less than {size(_MIN_SHARD_BYTES)} (write 1GB)")
    return PackOptions(
        resize=request.resize,
        quality=_DEFAULT_QUALITY if request.quality is None else request.quality,
        shard_bytes=shard_bytes,
        skip_bad=skip_bad,
        overwrite=request.overwrite,
    )


def _write_pack(
    datasets: Datasets, out: Path, options: PackOptions, workers: int, progress: DataProgress
) -> PackSummary:
    made = write_pack(datasets, out, options, progress, workers)
    section = Pack(name="pack", root=str(out))
    return PackSummary(made.images, _datasets_bytes(datasets), made.bytes, progress.elapsed_s, made.kept, section)


def _write_lmdb(datasets: Datasets, out: Path, progress: DataProgress, workers: int, *, skip_bad: bool) -> PackSummary:
    write_lmdb(datasets, out, progress, skip_bad=skip_bad, workers=workers)
    num_images = len(datasets.train) + len(datasets.val)
    num_bytes = (out / "data.mdb").stat().st_blocks * 512  # the file may have holes
    section = Lmdb(name="lmdb", root=str(out))
    return PackSummary(num_images, _datasets_bytes(datasets), num_bytes, progress.elapsed_s, {}, section)


def _datasets_bytes(datasets: Datasets) -> float | None:
    splits = [estimate_source_bytes(source) for source in (datasets.train, datasets.val)]
    return None if None in splits else sum(filter(None, splits))


def _summary_rows(datasets: Datasets, written: PackSummary, request: PackRequest) -> Iterator[tuple[str, str]]:
    splits = f"{len(datasets.train):,} of training, {len(datasets.val):,} of validation"
    yield "images", f"{written.images:,} ({splits})"
    yield "bytes", _sizes_text(written)
    speed = f"{written.images / max(written.seconds, 1e-9):,.0f} images/s"
    yield "time", f"{seconds(written.seconds)} ({speed})"
    if request.resize:
        quality = request.quality or _DEFAULT_QUALITY
        how = f"short sides above {request.resize} px scaled to that, and encoded at quality {quality}"
        yield "changed", f"{how}: pixels differ from the source"
    for reason, images in written.copied.items():
        yield "kept as they were", f"{count(images, 'image')}: {reason}"
    if load_native() is None and request.form == "pack" and not isinstance(datasets.train, ArraySource):
        yield "note", NATIVE_MISSING_MESSAGE


def _sizes_text(written: PackSummary) -> str:
    if not written.source_bytes:
        return size(written.bytes)
    ratio = written.bytes / written.source_bytes
    return f"{size(written.source_bytes)} read, {size(written.bytes)} written ({number(round(ratio, 3))} times)"


def unpack_data(src: str, out: Path, workers: str, *, as_json: bool) -> int:
    """Run `paceline data unpack`, and return the exit code."""
    num_workers = count_workers(workers)
    source = read_source(src, []).source
    if source.name != "pack":
        raise RecipeError(f"{src!r}: is not a pack (name a .pack file or a folder of shards)")
    packed = build_datasets(source, may_download=False, skip_bad=True)
    folder = expand_path(str(out)).absolute()
    with build_data_progress("images") as progress:
        made = unpack(packed, folder, progress, num_workers)
    if as_json:
        print(json.dumps({**asdict(made), "seconds": round(progress.elapsed_s, 3)}, indent=2))
        return 0
    rows = [
        ("images", f"{made.images:,}, in {printable(folder)}/train and /val"),
        ("bytes", size(made.bytes)),
        ("time", f"{seconds(progress.elapsed_s)} ({made.images / max(progress.elapsed_s, 1e-9):,.0f} images/s)"),
    ]
    print_rows(rows, printable(src))
    return 0


def stage_data(args: list[str], *, remove: bool, own_code: bool = False, as_json: bool) -> int:
    """Run `paceline data stage`, and return the exit code. `args` are SRC WHERE [KEY=VALUE ...]."""
    if remove:
        return _remove_copies(args, as_json=as_json)
    if len(args) < 2 or "=" in args[1]:
        raise RecipeError("paceline data stage: needs SRC and WHERE (such as: paceline data stage ~/photos /dev/shm)")
    src, where, *overrides = args
    section = read_source(src, overrides, own_code=own_code).source
    with build_data_progress("bytes") as progress:
        copy = stage_permanently(section, expand_path(where), progress)
    staged = build_staged_section(section, copy)
    if as_json:
        values = {"folder": str(copy), "seconds": round(progress.elapsed_s, 3), "source": staged.model_dump()}
        print(json.dumps(values, indent=2))
        return 0
    rows = [
        ("copy", printable(copy)),
        ("time", seconds(progress.elapsed_s)),
        ("a run uses it", f"with data.stage={where}"),
        ("to remove it", f"paceline data stage --remove {where}"),
    ]
    print_rows(rows, printable(src))
    print(f"or, in a recipe: {recipe_overrides(staged)}")
    return 0


def _remove_copies(args: list[str], *, as_json: bool) -> int:
    if len(args) != 1:
        raise RecipeError("--remove: takes only the folder (such as: paceline data stage --remove /dev/shm)")
    removed = unstage(expand_path(args[0]))
    if as_json:
        print(json.dumps({"removed": [str(folder) for folder in removed]}, indent=2))
        return 0
    print("\n".join(f"removed {printable(folder)}" for folder in removed) or f"no copies in {printable(args[0])}")
    return 0
