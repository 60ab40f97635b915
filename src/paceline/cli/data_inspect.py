"""`paceline data inspect`: summarize a dataset, or list its validation images."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from paceline.cli.data_source import DataRequest, read_source
from paceline.cli.options import DataInspectOptions
from paceline.cli.progress_output import DataProgress
from paceline.cli.tables import print_rows, print_table
from paceline.core.dataset import ArraySource, Datasets, Source
from paceline.core.errors import RecipeError
from paceline.core.results import is_imbalanced
from paceline.core.run_dir import RunDir, is_run
from paceline.core.units import count, number, size
from paceline.data.files import expand_path, printable
from paceline.data.pack.reader import PackSource
from paceline.data.sources.build import build_datasets
from paceline.data.sources.fingerprint import digest_datasets, get_labels
from paceline.data.sources.image_files import ImageFileSource
from paceline.lab.dataset_stats import DatasetStats, inspect_source

_NUM_SAMPLED: Final = 2000
_NUM_RAREST: Final = 3


def inspect_data(options: DataInspectOptions) -> int:
    """Run `paceline data inspect`, and return the exit code."""
    request = read_source(options.src, options.overrides, trust_code=options.trust_code)
    datasets = build_datasets(request.source, may_download=False, skip_bad=True)
    limit = None if options.inspect_all else _NUM_SAMPLED
    with DataProgress("images") as progress:
        splits = [inspect_source(source, limit, progress) for source in (datasets.train, datasets.val)]
    digest = digest_datasets(datasets)
    if options.as_json:
        values = {split.info.split: split.to_dict() for split in splits}
        print(json.dumps({"source": request.source.model_dump(), "digest": digest, **values}, indent=2))
        return 0
    _print_inspection(request, datasets, splits, digest)
    return 0


def _print_inspection(request: DataRequest, datasets: Datasets, splits: Sequence[DatasetStats], digest: str) -> None:
    print_rows(list(_inspection_rows(request, datasets, splits, digest)), request.name)
    headings = ("split", "images", "classes", "fewest", "most", "bytes")
    rows = [_count_row(split) for split in splits]
    print_table("classes, and images per class", headings, rows)
    sizes = [row for split in splits for row in _size_rows(split)]
    if sizes:
        print_table(
            "sides in pixels", ("split", "side", "min", "10 %", "median", "90 %", "max"), sizes, text_columns=("side",)
        )


def _inspection_rows(
    request: DataRequest, datasets: Datasets, splits: Sequence[DatasetStats], digest: str
) -> Iterator[tuple[str, str]]:
    info = datasets.train.info
    yield "source", request.source.name
    yield "digest", digest
    yield "channels", {1: "1 (gray)", 3: "3 (color)"}.get(info.channels, str(info.channels))
    if info.pixels != "uint8":
        yield "pixels", info.pixels
    for split in splits:
        yield f"{split.info.split} images", "; ".join(_content_texts(split))
    match datasets.train:
        case PackSource() as packed if packed.index.meta.made.resize:
            made = packed.index.meta.made
            yield (
                "changed",
                f"short sides above {made.resize} px were scaled down, and encoded at quality {made.quality}",
            )
    rare = _rarest_text(splits[0])
    if rare:
        yield "rarest classes", rare
    if is_imbalanced(splits[0].class_counts.tolist()) and get_labels(datasets.train) is not None:
        advice = "train.class_weights=balanced gives all classes the same weight in the loss"
        yield "uneven classes", f"{advice}, and data.sampler=balanced draws them equally often"
    if info.mean:
        yield "mean, std", f"{_join_floats(info.mean)}, {_join_floats(info.std)}"
    for split in splits:
        for note in split.info.notes:
            yield "note", f"{split.info.split}: {note}"


def _content_texts(split: DatasetStats) -> Iterator[str]:
    """Yield record kinds of a pack, file formats and unreadable images of a split."""
    kinds = {**split.pack_kinds} or {**split.formats}
    if not split.info.num_images:
        yield "none"
        return
    some = "" if split.num_inspected >= split.info.num_images else f" (of {split.num_inspected:,} inspected)"
    yield ", ".join(f"{num:,} {kind}" for kind, num in kinds.items()) + some if kinds else "none can be read"
    if split.pack_kinds and split.formats:
        yield "files are " + ", ".join(f"{num:,} {form}" for form, num in split.formats.items())
    if split.num_bad:
        yield f"{count(split.num_bad, 'image')} cannot be read (see paceline data verify)"


def _rarest_text(split: DatasetStats) -> str:
    """Return the rarest classes; "" if all are equally frequent."""
    if split.imbalance == 1:
        return ""
    order = np.argsort(split.class_counts, kind="stable")[:_NUM_RAREST]
    named = ", ".join(f"{split.info.class_names[index]}: {split.class_counts[index]:,}" for index in order)
    ratio = "some have none" if math.isinf(split.imbalance) else f"1 to {number(round(split.imbalance, 1))}"
    return f"{named} (in training; {ratio})"


def _count_row(split: DatasetStats) -> tuple[str, ...]:
    about = "" if split.num_inspected >= split.info.num_images else "about "
    return (
        split.info.split,
        f"{split.info.num_images:,}",
        f"{split.info.num_classes:,}",
        f"{int(split.class_counts.min()):,}",
        f"{int(split.class_counts.max()):,}",
        f"{about}{size(split.total_bytes)}",
    )


def _size_rows(split: DatasetStats) -> Iterator[tuple[str, ...]]:
    for side, values in split.percentiles.items():
        yield (split.info.split, side, *(f"{value:,}" for value in values))


def _join_floats(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def list_validation(options: DataInspectOptions) -> int:
    """Print the names of the validation images, relative to their root; return the exit code.

    Raise `DataError` if the files of a run have changed since training, which changes the split of a folder, and
    `RecipeError` for images without names.
    """
    if options.inspect_all:
        raise RecipeError("--all: inspects images, but --held-out only lists them (leave it out)")
    request = read_source(options.src, options.overrides, trust_code=options.trust_code)
    datasets = build_datasets(request.source, may_download=False, skip_bad=True)
    if isinstance(datasets.val, ArraySource):
        raise RecipeError(f"--held-out: {request.name} is pixels in memory, without names (name a folder or a list)")
    digest = digest_datasets(datasets)
    _refuse_changed(options.src, request, digest)
    names = (_sample_name(datasets.val, index) for index in range(len(datasets.val)))
    if options.as_json:
        print(json.dumps({"source": request.source.model_dump(), "digest": digest, "held_out": list(names)}, indent=2))
        return 0
    for name in names:
        print(name)
    return 0


def _refuse_changed(src: str | None, request: DataRequest, digest: str) -> None:
    """Raise `DataError` if the run was trained on other images."""
    if not (src and request.is_recipe and is_run(expand_path(src))):
        return
    run = RunDir(expand_path(src))
    from paceline.training.checkpoint import CheckpointStorage, KeepPolicy
    from paceline.training.resume import check_dataset

    newest = CheckpointStorage(run.checkpoints, KeepPolicy(1)).newest()
    if newest is not None:
        check_dataset(newest, digest)
        return
    what = "holds no checkpoint to compare with"
    print(f"note: {run.path}: {what}: files may have been added, removed or changed since training", file=sys.stderr)


def _sample_name(source: Source, index: int) -> str:
    return printable(source.get_listed_path(index)) if isinstance(source, ImageFileSource) else source.name_of(index)
