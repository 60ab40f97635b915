"""Convert a dataset into one LMDB."""

import errno
import os
import shutil
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import ValidationError

from paceline.core.dataset import ArraySource, Datasets, Source, Split
from paceline.core.errors import DataError
from paceline.data.convert.encode import EncodedSample, SampleEncoder, build_bad_images_error, map_ordered
from paceline.data.decode_array import encode_pixels
from paceline.data.file_lock import create_folder_atomically
from paceline.data.files import fsync_path, printable
from paceline.data.native import load_native
from paceline.data.pack.format import KIND_PIXELS
from paceline.data.sources.fingerprint import digest_split
from paceline.data.sources.image_files import ImageFileSource
from paceline.data.sources.lmdb import (
    LAYOUT_VERSION,
    METADATA_CRC_KEY,
    METADATA_KEY,
    LmdbMetadata,
    LmdbSplitMetadata,
    build_labels_key,
    build_sample_key,
    describe_invalid_metadata,
    encode_sample,
    open_lmdb,
)

if TYPE_CHECKING:
    import lmdb

_INITIAL_MAP_BYTES = 2**30  # doubled whenever it is full
_BATCH_BYTES = 2**26  # per transaction
_IMAGES_PER_TASK = 8
_SEEK_EVERY_MCUS = 8  # of no effect: the record is discarded after it has shown that a JPEG is readable
_LOCK_NAME = "writer.lock"
_KeyValue = tuple[bytes, bytes]


def write_lmdb(
    datasets: Datasets,
    out: Path,
    progress: Callable[[int, int], None],
    *,
    skip_bad: bool = False,
    workers: int = 1,
) -> None:
    """Write both splits to the new folder `out` with `workers` threads; call `progress` with (images done, total).

    Encoded images are stored unchanged, pixels of an `ArraySource` raw, and other pixels as PNG. Raise `DataError` if
    `out` cannot be written, classes or statistics are invalid or, without `skip_bad`, images cannot be read.
    """
    _require_lmdb()
    if datasets.train.info.targets is not None:
        raise DataError(f"{printable(out)}: an LMDB holds one label per image (write a pack: leave out --format lmdb)")
    form = datasets.train.info.pixel_format
    if not form.is_photo:
        raise DataError(
            f"--format: lmdb holds 8-bit gray or RGB images, and these have {form} (leave it out for a pack)"
        )
    if os.path.lexists(out):
        raise DataError(f"{printable(out)}: exists already (remove it, or write to another folder)")
    _check_metadata(datasets, out)
    try:
        # A killed writer leaves `.NAME.partial`, which nothing reads and the next writer removes.
        with create_folder_atomically(out, "partial", _LOCK_NAME) as temporary:
            _write_entries(temporary, datasets, progress, skip_bad=skip_bad, workers=workers)
            open_lmdb(temporary / "data.mdb")  # raises if it cannot be read back
            fsync_path(temporary / "data.mdb")
            fsync_path(temporary)
        fsync_path(out.parent)
    except OSError as error:
        raise _write_error(out, error.strerror or str(error)) from error


def _require_lmdb() -> None:
    try:
        import lmdb  # noqa: F401
    except ImportError as error:
        raise DataError(
            "an LMDB is written by the package lmdb, which is not installed (pip install 'paceline[lmdb]')"
        ) from error


def _check_metadata(datasets: Datasets, out: Path) -> None:
    """Raise `DataError`, before any image is written, for what the metadata at the end cannot hold."""
    splits: dict[Split, _LmdbSplitWriter] = {
        "train": _LmdbSplitWriter(datasets.train),
        "val": _LmdbSplitWriter(datasets.val),
    }
    try:
        _build_metadata(splits, lambda source: bytes(32))  # a digest may have to read the images
    except ValidationError as error:
        reason = describe_invalid_metadata(error)
        raise DataError(
            f"{printable(out)}: cannot describe the dataset: {reason} (correct it in the dataset)"
        ) from None


def _write_error(out: Path, reason: str) -> DataError:
    return DataError(f"{printable(out)}: cannot be written: {reason} (make room, or write to another folder)")


def _write_entries(
    folder: Path, datasets: Datasets, progress: Callable[[int, int], None], *, skip_bad: bool, workers: int
) -> None:
    import lmdb

    core = load_native()
    encoder = SampleEncoder(core.index_jpeg if core else None, _SEEK_EVERY_MCUS, None, 0, keeps_files=True)
    total, done = len(datasets.train) + len(datasets.val), 0
    splits: dict[Split, _LmdbSplitWriter] = {
        "train": _LmdbSplitWriter(datasets.train),
        "val": _LmdbSplitWriter(datasets.val),
    }
    try:
        # No sync before the end: until then the folder has a temporary name.
        with lmdb.open(str(folder), map_size=_INITIAL_MAP_BYTES, sync=False, metasync=False, lock=False) as env:
            for writer in splits.values():
                for batch in writer.batches(encoder, workers):
                    _put_entries(env, batch, in_order=True)
                    done += len(batch)
                    progress(done, total)
            bad = [each for writer in splits.values() for each in writer.bad]
            if bad and not skip_bad:
                raise build_bad_images_error(bad)
            _put_entries(env, _build_metadata_entries(splits), in_order=False)
            env.sync(True)
    except lmdb.Error as error:
        reason = str(error).rpartition(": ")[2]
        if reason == os.strerror(errno.EIO):  # LMDB reports a short write, such as on a full disk, as EIO
            reason = f"only part of a write was done, and {shutil.disk_usage(folder).free:,} bytes are free"
        raise OSError(errno.EIO, reason) from error


def _put_entries(env: "lmdb.Environment", entries: list[_KeyValue], *, in_order: bool) -> None:
    import lmdb

    while True:
        try:
            with env.begin(write=True) as transaction:
                for key, value in entries:
                    transaction.put(key, value, append=in_order)
        except lmdb.MapFullError:
            # The file must grow; retry the whole transaction.
            env.set_mapsize(2 * env.info()["map_size"])
        else:
            return


@dataclass(frozen=True)
class _LmdbSplitWriter:
    source: Source
    labels: "array[int]" = field(default_factory=lambda: array("i"))
    bad: list[tuple[str, str]] = field(default_factory=list)

    def batches(self, encoder: SampleEncoder, workers: int) -> Iterator[list[_KeyValue]]:
        batch: list[_KeyValue] = []
        num_bytes = 0
        numbers = range(len(self.source))
        with closing(map_ordered(partial(encoder, self.source), numbers, workers, chunk=_IMAGES_PER_TASK)) as read:
            for samples in read:
                batch += [self._build_entry(sample) for sample in samples]
                num_bytes += sum(len(value) for _, value in batch[-len(samples) :])
                if num_bytes >= _BATCH_BYTES:
                    yield batch
                    batch, num_bytes = [], 0
        if batch:
            yield batch

    def _build_entry(self, sample: EncodedSample) -> _KeyValue:
        index = len(self.labels)
        name = _sample_name(self.source, index)
        if sample.is_bad:
            self.bad.append((name, sample.unchanged_reason))
        self.labels.append(sample.label)
        return build_sample_key(self.source.info.split, index), encode_sample(
            sample.label, _stored_bytes(self.source, sample), name
        )

    def pack_labels(self) -> bytes:
        return np.array(self.labels, dtype="<i4").tobytes()

    def build_metadata(self, digest: bytes) -> LmdbSplitMetadata:
        info = self.source.info
        return LmdbSplitMetadata(
            name=info.name,
            num_images=len(self.labels),
            image_size=info.image_size,
            mean=info.mean,
            std=info.std,
            notes=info.notes,
            kind="pixels" if isinstance(self.source, ArraySource) else "encoded",
            digest=digest.hex(),
            labels_crc32=zlib.crc32(self.pack_labels()),
        )


def _sample_name(source: Source, index: int) -> str:
    # Relative to the root, so that the file does not depend on where the source is.
    match source:
        case ImageFileSource():
            return printable(source.get_listed_path(index))
    return source.name_of(index)


def _stored_bytes(source: Source, sample: EncodedSample) -> bytes:
    if sample.kind != KIND_PIXELS or isinstance(source, ArraySource):
        return sample.data
    return encode_pixels(np.frombuffer(sample.data, dtype=np.uint8).reshape(sample.height, sample.width, -1))


def _build_metadata(splits: dict[Split, _LmdbSplitWriter], digest: Callable[[Source], bytes]) -> LmdbMetadata:
    train, val = splits["train"], splits["val"]
    return LmdbMetadata(
        version=LAYOUT_VERSION,
        class_names=train.source.info.class_names,
        channels=3 if train.source.info.channels == 3 else 1,
        train=train.build_metadata(digest(train.source)),
        val=val.build_metadata(digest(val.source)),
    )


def _build_metadata_entries(splits: dict[Split, _LmdbSplitWriter]) -> list[_KeyValue]:
    text = _build_metadata(splits, digest_split).model_dump_json(indent=1).encode()
    labels = [(build_labels_key(split), writer.pack_labels()) for split, writer in splits.items()]
    return [*labels, (METADATA_KEY, text), (METADATA_CRC_KEY, b"%08x" % zlib.crc32(text))]
