"""Make a pack of a data set: with all cores, in the order of the samples, and so that a kill costs seconds of work.

While it is made it is a folder `.NAME.part` beside its place (`part`); only a whole one gets its name (`assemble`).
What a sample becomes is decided in `encode`. Bytes of a pack depend on the source and the options alone: not on how
many threads make it, nor on how often it was interrupted.
"""

import errno
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import PIL

from paceline.core.dataset import ArraySource, Datasets, Source
from paceline.core.errors import DataError
from paceline.data.identity import split_digest
from paceline.data.native import native
from paceline.data.pack.assemble import Names, assemble, check_replaceable
from paceline.data.pack.encode import Encoded, Encoder, refusal_of
from paceline.data.pack.format import VERSION, Made, Meta, SplitMeta
from paceline.data.pack.marks import Marker, build_marker
from paceline.data.pack.ordered import in_order
from paceline.data.pack.part import Part
from paceline.data.sources.places import printable

_MIN_SHARD_BYTES = 1 << 20
_PIXELS_A_TASK, _FILES_A_TASK, _MARKS_A_TASK = 1024, 8, 1024


@dataclass(frozen=True)
class PackOptions:
    """How a pack is made.

    `resize` is the most pixels of an image's short side (None: no image is changed), saved at JPEG `quality`.
    `shard_bytes` is the most bytes of a shard, if it holds more than one image; None makes one file. `every` is the
    MCUs between seek points. With `skip_bad` images that cannot be read are kept as they are, for whoever trains to
    skip. `overwrite` replaces a pack that is there.
    """

    resize: int | None = None
    quality: int = 90
    shard_bytes: int | None = None
    every: int = 8
    skip_bad: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class Packed:
    """A pack that was made: its images and bytes, and how many images were kept whole, by reason."""

    images: int
    bytes: int
    kept: dict[str, int]


def pack(
    datasets: Datasets,
    out: Path,
    options: PackOptions,
    progress: Callable[[int, int], None],
    workers: int,
) -> Packed:
    """Write both splits to `out`, a file, or a folder where `options` ask for shards, with `workers` threads.

    `progress` is told how many images are done, and of how many. What was begun before and not finished is gone on
    with, from the first image on whose file is another since. Raise `DataError` where `out` is there, cannot be written
    to or is another's beginning, where the disk is full, and, unless `options.skip_bad`, at the end, for images that
    cannot be read.
    """
    out = out.absolute()
    _check_options(options)
    _check_out(out, options)
    core = native()
    key = _key(datasets, options, has_native=core is not None)
    encoder = Encoder(core.index_jpeg if core else None, options.every, options.resize, options.quality)
    names = (Names.of(datasets.train), Names.of(datasets.val))
    try:
        beside = out.with_name(f".{out.name}.part")
        with closing(Part.opened(beside, key, options.shard_bytes, keeps_bad=options.skip_bad)) as part:
            _fill(part, datasets, encoder, progress, max(1, workers))
            kept = _kept(part, names, skip_bad=options.skip_bad)
            num_bytes = assemble(part, _meta(datasets, options), names, key[:16], out, overwrite=options.overwrite)
            return Packed(part.num_done, num_bytes, kept)
    except OSError as error:
        raise _unwritable(out, error) from error


def _check_options(options: PackOptions) -> None:
    if options.resize is not None and options.resize < 1:
        raise DataError(f"resize: {options.resize} is no number of pixels (set 256, or leave it out)")
    if not 1 <= options.quality <= 100:
        raise DataError(
            f"quality: {options.quality} is not between 1 and 100 (90 can hardly be told from the original)"
        )
    if not 1 <= options.every <= 255:
        raise DataError(f"every: {options.every} is not between 1 and 255 (8 is a good choice)")
    if options.shard_bytes is not None and options.shard_bytes < _MIN_SHARD_BYTES:
        raise DataError(f"shard bytes: {options.shard_bytes:,} are fewer than {_MIN_SHARD_BYTES:,} (make them larger)")


def _check_out(out: Path, options: PackOptions) -> None:
    """Refuse a place that cannot take a pack, or where something is that must not be lost."""
    if not out.parent.is_dir():
        raise DataError(f"{printable(out)}: {printable(out.parent)} is no folder (make it, or write elsewhere)")
    if options.overwrite:
        check_replaceable(out)
    elif os.path.lexists(out):
        raise DataError(f"{printable(out)}: exists already (write elsewhere, or replace it with --overwrite)")


def _key(datasets: Datasets, options: PackOptions, *, has_native: bool) -> bytes:
    """Return what decides every byte of a pack, as 32 bytes."""
    facts = {
        "version": VERSION,
        "meta": _meta(datasets, options).packed().decode(),
        "shard_bytes": options.shard_bytes,
        "has_native": has_native,
        "pillow": PIL.__version__ if options.resize else "",
        "sizes": [len(datasets.train), len(datasets.val)],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def _meta(datasets: Datasets, options: PackOptions) -> Meta:
    info = datasets.train.info
    channels = info.channels
    assert channels in (1, 3) and info.class_names == datasets.val.info.class_names
    made = Made(resize=options.resize, quality=options.quality if options.resize else None, every=options.every)
    return Meta(
        class_names=tuple(_text(name) for name in info.class_names),
        channels=1 if channels == 1 else 3,
        made=made,
        train=_split_meta(datasets.train, made),
        val=_split_meta(datasets.val, made),
    )


def _split_meta(source: Source, made: Made) -> SplitMeta:
    info, digest = source.info, split_digest(source)
    if made.resize and not isinstance(source, ArraySource):  # its images are others now
        digest = hashlib.sha256(digest + json.dumps(_changes(made), sort_keys=True).encode()).digest()
    return SplitMeta(
        name=_text(info.name),
        mean=info.mean,
        std=info.std,
        notes=tuple(_text(note) for note in info.notes),
        image_size=info.image_size,
        digest=digest.hex(),
    )


def _changes(made: Made) -> dict[str, int | None]:
    """Return what changes pixels."""
    return {"resize": made.resize, "quality": made.quality}


def _text(text: str) -> str:
    """Return `text` so that JSON can hold it: bytes that are no UTF-8 as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _fill(part: Part, datasets: Datasets, encoder: Encoder, progress: Callable[[int, int], None], workers: int) -> None:
    """Append all samples that `part` lacks, in order."""
    total = len(datasets.train) + len(datasets.val)
    markers = (build_marker(datasets.train), build_marker(datasets.val))
    part.cut(_num_unchanged(part, len(datasets.train), markers, workers))
    progress(part.num_done, total)
    try:
        with closing(in_order(_tasks(datasets, encoder, markers, part.num_done), workers)) as encoded:
            for samples in encoded:
                for sample in samples:
                    part.add(sample, is_first=part.num_done in (0, len(datasets.train)))
                progress(part.num_done, total)
    finally:
        if part.num_done < total:
            part.sync()  # what is done stays done, whatever has ended this


def _num_unchanged(part: Part, num_train: int, markers: tuple[Marker, Marker], workers: int) -> int:
    """Return how many samples of `part` are still what they were, up to the first that is not."""
    if not part.num_done:
        return 0
    marks = part.rows()["mark"].copy()  # what is mapped may be cut
    tasks = (
        partial(_marks, markers, num_train, first, min(first + _MARKS_A_TASK, len(marks)))
        for first in range(0, len(marks), _MARKS_A_TASK)
    )
    first = 0
    with closing(in_order(tasks, workers)) as found:
        for each in found:
            changed = np.flatnonzero(marks[first : first + len(each)] != np.array(each, dtype=np.uint64))
            if len(changed):
                return first + int(changed[0])
            first += len(each)
    return first


def _marks(markers: tuple[Marker, Marker], num_train: int, first: int, stop: int) -> list[int]:
    train, val = markers
    return [train(number) if number < num_train else val(number - num_train) for number in range(first, stop)]


def _tasks(
    datasets: Datasets, encoder: Encoder, markers: tuple[Marker, Marker], num_done: int
) -> Iterator[Callable[[], list[Encoded]]]:
    """Give what there is to do after the first `num_done` samples of both splits, a few samples at a time."""
    start = 0
    for source, marker in zip((datasets.train, datasets.val), markers, strict=True):
        step = _PIXELS_A_TASK if isinstance(source, ArraySource) else _FILES_A_TASK
        for first in range(max(0, num_done - start), len(source), step):
            yield partial(_encode, encoder, source, marker, first, min(first + step, len(source)))
        start += len(source)


def _encode(encoder: Encoder, source: Source, marker: Marker, first: int, stop: int) -> list[Encoded]:
    return [_marked(encoder, source, marker(number), number) for number in range(first, stop)]


def _marked(encoder: Encoder, source: Source, mark: int, number: int) -> Encoded:
    """Return a sample with its mark, which was taken before it is read: who replaces it meanwhile is found out."""
    return replace(encoder(source, number), mark=mark)


def _kept(part: Part, names: tuple[Names, Names], *, skip_bad: bool) -> dict[str, int]:
    """Return how many files were kept whole, by reason. Raise `DataError` for bad ones where they are not skipped."""
    rows = part.rows()
    bad = np.flatnonzero(rows["is_bad"])
    if len(bad) and not skip_bad:
        first_of_val = len(names[0].ends)
        named = []
        for number in bad.tolist():
            name = names[0].of_sample(number) if number < first_of_val else names[1].of_sample(number - first_of_val)
            named.append((name, part.reason(int(rows[number]["reason"]))))
        raise refusal_of(named)
    reasons = Counter(rows["reason"].tolist())
    return {part.reason(number): reasons[number] for number in sorted(reasons) if number}


def _unwritable(out: Path, error: OSError) -> DataError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(f"{printable(out)}: the disk is full (free some space and pack again: it goes on from here)")
    return DataError(f"{printable(out)}: cannot be written: {error.strerror or error} (write elsewhere)")
