"""Convert a data set into a pack, with several threads and in sample order; an interrupted run resumes."""

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
    """Options of a pack.

    `resize` is the maximum short side in pixels (None changes no image), saved as JPEG with `quality`. `shard_bytes` is
    the maximum size of a shard with more than one image, None for one file. `every` is the number of MCUs between seek
    points. `skip_bad` stores unreadable images as they are. `overwrite` replaces an existing pack.
    """

    resize: int | None = None
    quality: int = 90
    shard_bytes: int | None = None
    every: int = 8
    skip_bad: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class Packed:
    """A finished pack: images, bytes, and the number of files stored unchanged, by reason."""

    images: int
    bytes: int
    kept: dict[str, int]


# The bytes of a pack depend only on the source and the options, not on the number of threads or interruptions.
def pack(
    datasets: Datasets,
    out: Path,
    options: PackOptions,
    progress: Callable[[int, int], None],
    workers: int,
) -> Packed:
    """Write both splits to `out`, a file, or a folder of shards, with `workers` threads; call `progress` with (done,
    total).

    An interrupted run resumes at the first sample whose file has changed. Raise `DataError` if `out` exists, cannot be
    written, or belongs to another unfinished pack, if the disk is full, and, unless `options.skip_bad`, for unreadable
    images after all others are packed.
    """
    out = out.absolute()
    _check_options(options)
    _check_out(out, options)
    core = native()
    key = _key(datasets, options, has_native=core is not None)
    encoder = Encoder(core.index_jpeg if core else None, options.every, options.resize, options.quality)
    names = (Names.of(datasets.train), Names.of(datasets.val))
    try:
        unfinished = out.with_name(f".{out.name}.part")
        with closing(Part.opened(unfinished, key, options.shard_bytes, keeps_bad=options.skip_bad)) as partial_pack:
            _fill(partial_pack, datasets, encoder, progress, max(1, workers))
            kept_by_reason = _kept(partial_pack, names, skip_bad=options.skip_bad)
            num_bytes = assemble(
                partial_pack, _meta(datasets, options), names, key[:16], out, overwrite=options.overwrite
            )
            return Packed(partial_pack.num_done, num_bytes, kept_by_reason)
    except OSError as error:
        raise _unwritable(out, error) from error


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


def _check_out(out: Path, options: PackOptions) -> None:
    if not out.parent.is_dir():
        raise DataError(f"{printable(out)}: {printable(out.parent)} is not a folder (create it, or write elsewhere)")
    if options.overwrite:
        check_replaceable(out)
    elif os.path.lexists(out):
        raise DataError(f"{printable(out)}: exists already (write elsewhere, or replace it with --overwrite)")


def _key(datasets: Datasets, options: PackOptions, *, has_native: bool) -> bytes:
    """Return a 32-byte hash of everything that determines the bytes of a pack."""
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
    if made.resize and not isinstance(source, ArraySource):  # the pixels differ from the source's
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
    return {"resize": made.resize, "quality": made.quality}


def _text(text: str) -> str:
    """Escape bytes that are not valid UTF-8, so that JSON can hold `text`."""
    return text.encode("utf-8", "backslashreplace").decode()


def _fill(
    partial_pack: Part, datasets: Datasets, encoder: Encoder, progress: Callable[[int, int], None], workers: int
) -> None:
    total = len(datasets.train) + len(datasets.val)
    markers = (build_marker(datasets.train), build_marker(datasets.val))
    partial_pack.cut(_num_unchanged(partial_pack, len(datasets.train), markers, workers))
    progress(partial_pack.num_done, total)
    try:
        with closing(in_order(_tasks(datasets, encoder, markers, partial_pack.num_done), workers)) as encoded:
            for samples in encoded:
                for sample in samples:
                    partial_pack.add(sample, is_first=partial_pack.num_done in (0, len(datasets.train)))
                progress(partial_pack.num_done, total)
    finally:
        if partial_pack.num_done < total:
            partial_pack.sync()  # keep finished samples after an error or interrupt


def _num_unchanged(partial_pack: Part, num_train: int, markers: tuple[Marker, Marker], workers: int) -> int:
    if not partial_pack.num_done:
        return 0
    marks = partial_pack.rows()["mark"].copy()  # the mapped file may be truncated
    tasks = (
        partial(_marks, markers, num_train, first, min(first + _MARKS_A_TASK, len(marks)))
        for first in range(0, len(marks), _MARKS_A_TASK)
    )
    first = 0
    with closing(in_order(tasks, workers)) as mark_batches:
        for each in mark_batches:
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
    start = 0
    for source, marker in zip((datasets.train, datasets.val), markers, strict=True):
        step = _PIXELS_A_TASK if isinstance(source, ArraySource) else _FILES_A_TASK
        for first in range(max(0, num_done - start), len(source), step):
            yield partial(_encode, encoder, source, marker, first, min(first + step, len(source)))
        start += len(source)


def _encode(encoder: Encoder, source: Source, marker: Marker, first: int, stop: int) -> list[Encoded]:
    return [_marked(encoder, source, marker(number), number) for number in range(first, stop)]


def _marked(encoder: Encoder, source: Source, mark: int, number: int) -> Encoded:
    # `mark` is taken before the sample is read, so a file that is replaced meanwhile is detected.
    return replace(encoder(source, number), mark=mark)


def _kept(partial_pack: Part, names: tuple[Names, Names], *, skip_bad: bool) -> dict[str, int]:
    """Count the files stored unchanged, by reason. Raise `DataError` for bad images unless they are skipped."""
    rows = partial_pack.rows()
    bad = np.flatnonzero(rows["is_bad"])
    if len(bad) and not skip_bad:
        first_of_val = len(names[0].ends)
        named = []
        for number in bad.tolist():
            name = names[0].of_sample(number) if number < first_of_val else names[1].of_sample(number - first_of_val)
            named.append((name, partial_pack.reason(int(rows[number]["reason"]))))
        raise refusal_of(named)
    reasons = Counter(rows["reason"].tolist())
    return {partial_pack.reason(number): reasons[number] for number in sorted(reasons) if number}


def _unwritable(out: Path, error: OSError) -> DataError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(
            f"{printable(out)}: the disk is full (free some space and pack again: packing resumes from here)"
        )
    return DataError(f"{printable(out)}: cannot be written: {error.strerror or error} (write elsewhere)")
