"""`paceline data pack`, `unpack` and `stage`: write a dataset as a pack, a folder, or a local copy."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from paceline.cli.data_source import count_workers, parse_bytes, read_source, recipe_overrides
from paceline.cli.options import DataPackOptions, DataStageOptions, DataUnpackOptions
from paceline.cli.progress_output import DataProgress
from paceline.cli.tables import print_rows
from paceline.core.dataset import ArraySource, Datasets
from paceline.core.errors import RecipeError
from paceline.core.units import count, number, per_second, seconds, size
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


def pack_data(options: DataPackOptions) -> int:
    """Run `paceline data pack`, and return the exit code."""
    _check_options(options)
    num_workers = count_workers(options.workers)
    data_request = read_source(options.src, options.overrides, trust_code=options.trust_code)
    skip_bad = data_request.data.on_bad_image == "skip"
    pack_options = _pack_options(options, skip_bad=skip_bad)
    datasets = build_datasets(data_request.source, may_download=True, skip_bad=skip_bad)
    out = expand_path(str(options.out)).absolute()  # absolute, because a recipe may be used from another folder
    with DataProgress("images") as progress:
        if options.form == "lmdb":
            written = _write_lmdb(datasets, out, progress, num_workers, skip_bad=skip_bad)
        else:
            written = _write_pack(datasets, out, pack_options, num_workers, progress)
    if options.as_json:
        print(json.dumps(written.to_dict(), indent=2))
    else:
        print_rows(list(_summary_rows(datasets, written, options)), printable(out))
        print(f"in a recipe: {recipe_overrides(written.section)}")
    return 0


def _check_options(options: DataPackOptions) -> None:
    if options.form not in ("pack", "lmdb"):
        raise RecipeError(f"--format: {options.form!r} is not a format (write pack or lmdb)")
    pack_options = {
        "--resize": options.resize,
        "--quality": options.quality,
        "--shard-size": options.shard_size,
        "--overwrite": options.overwrite or None,
    }
    given = next((name for name, value in pack_options.items() if value is not None), None)
    if options.form == "lmdb" and given:
        raise RecipeError(f"{given}: is for packs, and --format is lmdb (leave it out)")
    if options.quality is not None and options.resize is None:
        raise RecipeError("--quality: has no effect without --resize, as no image is re-encoded (add --resize 256)")


def _pack_options(options: DataPackOptions, *, skip_bad: bool) -> PackOptions:
    shard_bytes = None if options.shard_size is None else parse_bytes(options.shard_size, "--shard-size")
    if shard_bytes is not None and shard_bytes < _MIN_SHARD_BYTES:
        raise RecipeError(f"--shard-size: {options.shard_size} is less than {size(_MIN_SHARD_BYTES)} (write 1GB)")
    return PackOptions(
        resize=options.resize,
        quality=_DEFAULT_QUALITY if options.quality is None else options.quality,
        shard_bytes=shard_bytes,
        skip_bad=skip_bad,
        overwrite=options.overwrite,
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


def _summary_rows(datasets: Datasets, written: PackSummary, options: DataPackOptions) -> Iterator[tuple[str, str]]:
    splits = f"{len(datasets.train):,} training, {len(datasets.val):,} validation"
    yield "images", f"{written.images:,} ({splits})"
    yield "bytes", _sizes_text(written)
    speed = f"{per_second(written.images / max(written.seconds, 1e-9))} images/s"
    yield "time", f"{seconds(written.seconds)} ({speed})"
    if options.resize:
        quality = options.quality or _DEFAULT_QUALITY
        how = f"short sides above {options.resize} px scaled to that, and encoded at quality {quality}"
        yield "changed", f"{how}: pixels differ from the source"
    for reason, images in written.copied.items():
        yield "kept as they were", f"{count(images, 'image')}: {reason}"
    if load_native() is None and options.form == "pack" and not isinstance(datasets.train, ArraySource):
        yield "note", NATIVE_MISSING_MESSAGE


def _sizes_text(written: PackSummary) -> str:
    if not written.source_bytes:
        return size(written.bytes)
    ratio = written.bytes / written.source_bytes
    return f"{size(written.source_bytes)} read, {size(written.bytes)} written ({number(round(ratio, 3))} times)"


def unpack_data(options: DataUnpackOptions) -> int:
    """Run `paceline data unpack`, and return the exit code."""
    num_workers = count_workers(options.workers)
    source = read_source(options.pack, []).source
    if source.name != "pack":
        raise RecipeError(f"{options.pack!r}: is not a pack (name a .pack file or a folder of shards)")
    packed = build_datasets(source, may_download=False, skip_bad=True)
    folder = expand_path(str(options.out)).absolute()
    with DataProgress("images") as progress:
        made = unpack(packed, folder, progress, num_workers)
    if options.as_json:
        print(json.dumps({**asdict(made), "seconds": round(progress.elapsed_s, 3)}, indent=2))
        return 0
    rows = [
        ("images", f"{made.images:,}, in {printable(folder)}/train and /val"),
        ("bytes", size(made.bytes)),
        ("time", f"{seconds(progress.elapsed_s)} ({per_second(made.images / max(progress.elapsed_s, 1e-9))} images/s)"),
    ]
    print_rows(rows, printable(options.pack))
    return 0


def stage_data(options: DataStageOptions) -> int:
    """Run `paceline data stage`, and return the exit code. `args` are SRC WHERE [KEY=VALUE ...]."""
    args = options.args
    if options.remove:
        return _remove_copies(args, as_json=options.as_json)
    if len(args) < 2 or "=" in args[1]:
        raise RecipeError("paceline data stage: needs SRC and WHERE (such as: paceline data stage ~/photos /dev/shm)")
    src, where, *overrides = args
    request = read_source(src, overrides, trust_code=options.trust_code)
    skip_bad = request.data.on_bad_image == "skip"
    with DataProgress("bytes") as progress:
        copy = stage_permanently(request.source, expand_path(where), progress, skip_bad=skip_bad)
    staged = build_staged_section(request.source, copy, skip_bad=skip_bad)
    if options.as_json:
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
