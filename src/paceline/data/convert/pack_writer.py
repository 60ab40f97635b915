"""Convert a dataset into a pack with several threads; an interrupted conversion resumes."""

import errno
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import PIL

from paceline.core.dataset import ArraySource, Datasets, JoinedNames, Source
from paceline.core.errors import DataError
from paceline.data.convert.assemble import assemble_pack, check_replaceable, format_sample_name, get_sample_names
from paceline.data.convert.encode import (
    EncodedSample,
    FileStateFunction,
    SampleEncoder,
    build_bad_images_error,
    build_file_state_function,
    map_ordered,
)
from paceline.data.convert.partial_pack import PartialPack
from paceline.data.files import printable
from paceline.data.native import load_native
from paceline.data.pack.format import MAX_META_BYTES, PACK_VERSION, PackMeta, ProcessingMeta, SplitMeta
from paceline.data.pack.targets import encode_targets
from paceline.data.sources.fingerprint import digest_split
from paceline.data.sources.statistics import with_measured

_MIN_SHARD_BYTES = 1 << 20
# Samples per task of a thread: pixels and file states take much less time than files.
_PIXELS_PER_TASK, _FILES_PER_TASK, _STATES_PER_TASK = 1024, 8, 1024


@dataclass(frozen=True)
class PackOptions:
    """Options of a pack."""

    resize: int | None = None  # maximum short side in pixels; None changes no image
    quality: int = 90  # of the JPEG file that a resized image is saved as
    shard_bytes: int | None = None  # maximum size of a shard with more than one image; None for one file
    every: int = 8  # MCUs between seek points
    skip_bad: bool = False  # store unreadable images as they are
    overwrite: bool = False  # replace an existing pack


@dataclass(frozen=True)
class PackResult:
    """A finished pack."""

    images: int
    bytes: int
    kept: dict[str, int]  # number of files stored unchanged, by reason


# The bytes of a pack depend only on the source and the options, not on the number of threads or interruptions.
def write_pack(
    datasets: Datasets,
    out: Path,
    options: PackOptions,
    progress: Callable[[int, int], None],
    workers: int,
) -> PackResult:
    """Write both splits to `out`, a file or a folder of shards; call `progress` with (done, total).

    An interrupted run resumes at the first shard that is unfinished or of which a file has changed. Raise `DataError`
    if `out` exists or cannot be written, another unfinished pack is in its place, the disk is full, or, after all other
    images are packed, for unreadable images without `options.skip_bad`.
    """
    out = out.absolute()
    _check_options(options)
    _check_output(out, options)
    form = datasets.train.info.pixel_format
    if options.resize and not form.is_photo:
        raise DataError(f"resize: {options.resize} makes JPEGs, and the images have {form} (leave it out)")
    datasets = with_measured(datasets, skip_bad=options.skip_bad)
    core = load_native()
    meta = _build_meta(datasets, options)
    key = _compute_key(datasets, meta, options, has_native=core is not None)
    encoder = SampleEncoder(core.index_jpeg if core else None, options.every, options.resize, options.quality)
    names = (get_sample_names(datasets.train), get_sample_names(datasets.val))
    try:
        unfinished = out.with_name(f".{out.name}.part")
        with closing(
            PartialPack.open(unfinished, key, options.shard_bytes, keeps_bad=options.skip_bad)
        ) as partial_pack:
            _add_missing_samples(partial_pack, datasets, encoder, progress, max(1, workers))
            kept_by_reason = _count_unchanged_files(partial_pack, names, skip_bad=options.skip_bad)
            num_bytes = assemble_pack(partial_pack, meta, names, key[:16], out, overwrite=options.overwrite)
            return PackResult(partial_pack.num_done, num_bytes, kept_by_reason)
    except OSError as error:
        raise _build_write_error(out, error) from error


def _check_options(options: PackOptions) -> None:
    if options.resize is not None and options.resize < 1:
        raise DataError(f"resize: {options.resize} is not a number of pixels (set 256, or leave it out)")
    if not 1 <= options.quality <= 100:
        raise DataError(
            f"quality: {options.quality} is not between 1 and 100 (90 is nearly indistinguishable from the original)"
        )
    if not 1 <= options.every <= 255:
        raise DataError(f"every: {options.every} is not between 1 and 255 (8 is a good choice)")
    if options.shard_bytes is not None and options.shard_bytes < _MIN_SHARD_BYTES:
        raise DataError(f"shard bytes: {options.shard_bytes:,} are fewer than {_MIN_SHARD_BYTES:,} (make them larger)")


def _check_output(out: Path, options: PackOptions) -> None:
    if not out.parent.is_dir():
        raise DataError(f"{printable(out)}: {printable(out.parent)} is not a folder (create it, or write elsewhere)")
    if options.overwrite:
        check_replaceable(out)
    elif os.path.lexists(out):
        raise DataError(f"{printable(out)}: exists already (write elsewhere, or replace it with --overwrite)")


def _compute_key(datasets: Datasets, meta: PackMeta, options: PackOptions, *, has_native: bool) -> bytes:
    # Everything that determines the bytes of a pack: an unfinished one is resumed only with the same key.
    inputs = {
        "version": PACK_VERSION,
        "meta": meta.to_json().decode(),
        "shard_bytes": options.shard_bytes,
        "has_native": has_native,
        "pillow": PIL.__version__ if options.resize else "",
        "sizes": [len(datasets.train), len(datasets.val)],
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).digest()


def _build_meta(datasets: Datasets, options: PackOptions) -> PackMeta:
    info = datasets.train.info
    assert info.class_names == datasets.val.info.class_names
    made = ProcessingMeta(
        resize=options.resize, quality=options.quality if options.resize else None, every=options.every
    )
    meta = PackMeta(
        class_names=tuple(_escape_undecodable(name) for name in info.class_names),
        channels=info.channels,
        pixels=info.pixels,
        made=made,
        train=_build_split_meta(datasets.train, made),
        val=_build_split_meta(datasets.val, made),
    )
    num_bytes = len(meta.to_json())
    if num_bytes > MAX_META_BYTES:
        raise DataError(
            f"the class names and targets are {num_bytes:,} bytes long, more than a pack holds "
            f"({MAX_META_BYTES:,}; use the source without packing it)"
        )
    return meta


def _build_split_meta(source: Source, made: ProcessingMeta) -> SplitMeta:
    info, digest = source.info, digest_split(source)
    if made.resize and not isinstance(source, ArraySource):  # the pixels differ from the source's
        digest = hashlib.sha256(digest + json.dumps(_describe_pixel_changes(made), sort_keys=True).encode()).digest()
    return SplitMeta(
        name=_escape_undecodable(info.name),
        mean=info.mean,
        std=info.std,
        notes=tuple(_escape_undecodable(note) for note in info.notes),
        image_size=info.image_size,
        digest=digest.hex(),
        targets=None if info.targets is None else encode_targets(info.targets),
    )


def _describe_pixel_changes(made: ProcessingMeta) -> dict[str, int | None]:
    return {"resize": made.resize, "quality": made.quality}


def _escape_undecodable(text: str) -> str:
    # JSON holds only valid UTF-8, while file names may be any bytes.
    return text.encode("utf-8", "backslashreplace").decode()


def _add_missing_samples(
    partial_pack: PartialPack,
    datasets: Datasets,
    encoder: SampleEncoder,
    progress: Callable[[int, int], None],
    workers: int,
) -> None:
    total = len(datasets.train) + len(datasets.val)
    file_states = (build_file_state_function(datasets.train), build_file_state_function(datasets.val))
    num_unchanged = _count_unchanged(partial_pack, len(datasets.train), file_states, workers)
    if num_unchanged < total:
        partial_pack.keep_before(num_unchanged)
    progress(partial_pack.num_done, total)
    first = 0
    for source, file_state in zip((datasets.train, datasets.val), file_states, strict=True):
        missing = range(max(0, partial_pack.num_done - first), len(source))
        chunk = _PIXELS_PER_TASK if isinstance(source, ArraySource) else _FILES_PER_TASK
        encode = partial(_encode_sample, encoder, source, file_state)
        with closing(map_ordered(encode, missing, workers, chunk=chunk)) as encoded:
            for samples in encoded:
                for sample in samples:
                    partial_pack.add(sample, is_first=partial_pack.num_done == first)
                progress(partial_pack.num_done, total)
        first += len(source)
    partial_pack.finish_shard()


def _count_unchanged(
    partial_pack: PartialPack, num_train: int, file_states: tuple[FileStateFunction, FileStateFunction], workers: int
) -> int:
    if not partial_pack.num_done:
        return 0
    old_states = np.concatenate([shard.rows["file_state"] for shard in partial_pack.shards])

    def compute_state(number: int) -> int:
        return file_states[0](number) if number < num_train else file_states[1](number - num_train)

    first = 0
    with closing(map_ordered(compute_state, range(len(old_states)), workers, chunk=_STATES_PER_TASK)) as batches:
        for each in batches:
            changed = np.flatnonzero(old_states[first : first + len(each)] != np.array(each, dtype=np.uint64))
            if len(changed):
                return first + int(changed[0])
            first += len(each)
    return first


def _encode_sample(encoder: SampleEncoder, source: Source, file_state: FileStateFunction, number: int) -> EncodedSample:
    state = file_state(
        number
    )  # before the sample is read, so that the next run detects a file that was replaced meanwhile
    return replace(encoder(source, number), file_state=state)


def _count_unchanged_files(
    partial_pack: PartialPack, names: tuple[JoinedNames, JoinedNames], *, skip_bad: bool
) -> dict[str, int]:
    bad = [] if skip_bad else list(partial_pack.iter_bad())
    if bad:
        num_train = len(names[0])
        named = [
            (format_sample_name(names[at >= num_train], at - num_train * (at >= num_train)), reason)
            for at, reason in bad
        ]
        raise build_bad_images_error(named)
    kept: Counter[str] = Counter()
    for shard in partial_pack.shards:
        for number, num_files in enumerate(np.bincount(shard.rows["reason"]).tolist()):
            kept[shard.reasons[number]] += num_files
    return {reason: num_files for reason, num_files in kept.items() if reason and num_files}


def _build_write_error(out: Path, error: OSError) -> DataError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(
            f"{printable(out)}: the disk is full (free some space and pack again: finished shards are kept)"
        )
    return DataError(f"{printable(out)}: cannot be written: {error.strerror or error} (write elsewhere)")
