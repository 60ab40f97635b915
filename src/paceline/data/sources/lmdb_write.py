"""Convert a data set into one LMDB; the folder gets its name only when it is complete and on disk."""

import errno
import io
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
from PIL import Image

from paceline.core.dataset import ArraySource, Datasets, Source, Split
from paceline.core.errors import DataError
from paceline.data.identity import split_digest
from paceline.data.native import native
from paceline.data.pack.encode import Encoded, Encoder, refusal_of
from paceline.data.pack.format import KIND_PIXELS
from paceline.data.pack.ordered import in_order
from paceline.data.sources.encoded import EncodedSource
from paceline.data.sources.lmdb import open_lmdb
from paceline.data.sources.lmdb_layout import (
    FACTS_CRC_KEY,
    FACTS_KEY,
    VERSION,
    Facts,
    SplitFacts,
    labels_key,
    pack_sample,
    sample_key,
)
from paceline.data.sources.places import printable
from paceline.data.unfinished import made_beside

if TYPE_CHECKING:
    import lmdb

_FIRST_MAP_BYTES = 2**30
_BATCH_BYTES = 2**26
_IMAGES_A_TASK = 8
_CHECKED_EVERY = 8
_LOCK = "writer.lock"
_Entry = tuple[bytes, bytes]


def write_lmdb(
    datasets: Datasets,
    out: Path,
    progress: Callable[[int, int], None],
    *,
    skip_bad: bool = False,
    workers: int = 1,
) -> None:
    """Write both splits to the new folder `out`; call `progress` with (images done, total).

    `workers` threads read and check every image. Encoded images are stored unchanged, the pixels of an `ArraySource`
    raw, and pixels of other sources as PNG. Raise `DataError` if the folder cannot be written or images cannot be read;
    `skip_bad` stores unreadable images as they are.
    """
    _library()
    if os.path.lexists(out):
        raise DataError(f"{printable(out)}: exists already (remove it, or write to another folder)")
    try:
        # A killed writer leaves `.NAME.partial`, which nothing reads and the next writer removes.
        with made_beside(out, "partial", _LOCK) as beside:
            _fill(beside, datasets, progress, skip_bad=skip_bad, workers=workers)
            open_lmdb(beside / "data.mdb")
            _sync(beside / "data.mdb")
            _sync(beside)
        _sync(out.parent)
    except OSError as error:
        raise _unwritable(out, error.strerror or str(error)) from error


def _library() -> None:
    try:
        import lmdb  # noqa: F401
    except ImportError as error:
        raise DataError(
            "an LMDB is written by the package lmdb, which is not installed (pip install 'paceline[lmdb]')"
        ) from error


def _unwritable(out: Path, reason: str) -> DataError:
    return DataError(f"{printable(out)}: cannot be written: {reason} (make room, or write to another folder)")


def _fill(
    folder: Path, datasets: Datasets, progress: Callable[[int, int], None], *, skip_bad: bool, workers: int
) -> None:
    import lmdb

    core = native()
    encoder = Encoder(core.index_jpeg if core else None, _CHECKED_EVERY, None, 0, keeps_files=True)
    total, done = len(datasets.train) + len(datasets.val), 0
    splits: dict[Split, _Written] = {"train": _Written(datasets.train), "val": _Written(datasets.val)}
    try:
        # No sync before the end: until then the folder has a temporary name.
        with lmdb.open(str(folder), map_size=_FIRST_MAP_BYTES, sync=False, metasync=False, lock=False) as env:
            for written in splits.values():
                for batch in written.batches(encoder, workers):
                    _put(env, batch, in_order=True)
                    done += len(batch)
                    progress(done, total)
            bad = [each for written in splits.values() for each in written.bad]
            if bad and not skip_bad:
                raise refusal_of(bad)
            _put(env, _about(splits), in_order=False)
            env.sync(True)
    except lmdb.Error as error:
        reason = str(error).rpartition(": ")[2]
        if reason == os.strerror(errno.EIO):  # LMDB reports a short write, such as on a full disk, as EIO
            reason = f"only part of a write was done, and {shutil.disk_usage(folder).free:,} bytes are free"
        raise OSError(errno.EIO, reason) from error


def _put(env: "lmdb.Environment", entries: list[_Entry], *, in_order: bool) -> None:
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
class _Written:
    source: Source
    labels: "array[int]" = field(default_factory=lambda: array("i"))
    bad: list[tuple[str, str]] = field(default_factory=list)

    def batches(self, encoder: Encoder, workers: int) -> Iterator[list[_Entry]]:
        """Yield the entries of the split in order, in batches of about 64 MiB."""
        batch: list[_Entry] = []
        num_bytes = 0
        with closing(in_order(self._tasks(encoder), workers)) as read:
            for samples in read:
                batch += [self._entry(sample) for sample in samples]
                num_bytes += sum(len(value) for _, value in batch[-len(samples) :])
                if num_bytes >= _BATCH_BYTES:
                    yield batch
                    batch, num_bytes = [], 0
        if batch:
            yield batch

    def _tasks(self, encoder: Encoder) -> Iterator[Callable[[], list[Encoded]]]:
        for first in range(0, len(self.source), _IMAGES_A_TASK):
            yield partial(_read, encoder, self.source, range(first, min(first + _IMAGES_A_TASK, len(self.source))))

    def _entry(self, sample: Encoded) -> _Entry:
        index = len(self.labels)
        name = _name(self.source, index)
        if sample.is_bad:
            self.bad.append((name, sample.kept))
        self.labels.append(sample.label)
        return sample_key(self.source.info.split, index), pack_sample(sample.label, _stored(self.source, sample), name)

    def stored_labels(self) -> bytes:
        """Return the labels as int32 bytes."""
        return np.array(self.labels, dtype="<i4").tobytes()

    def facts(self) -> SplitFacts:
        """Build the metadata of the split."""
        info = self.source.info
        return SplitFacts(
            name=info.name,
            num_images=len(self.labels),
            image_size=info.image_size,
            mean=info.mean,
            std=info.std,
            notes=info.notes,
            kind="pixels" if isinstance(self.source, ArraySource) else "encoded",
            digest=split_digest(self.source).hex(),
            labels_crc32=zlib.crc32(self.stored_labels()),
        )


def _name(source: Source, index: int) -> str:
    """Return a name that does not depend on the location: for files, the path relative to the root."""
    match source:
        case EncodedSource(paths=paths, ends=ends):
            return printable(os.fsdecode(paths[int(ends[index - 1]) if index else 0 : int(ends[index])]))
    return source.name_of(index)


def _read(encoder: Encoder, source: Source, indices: range) -> list[Encoded]:
    return [encoder(source, index) for index in indices]


def _stored(source: Source, sample: Encoded) -> bytes:
    if sample.kind != KIND_PIXELS or isinstance(source, ArraySource):
        return sample.data
    content = np.frombuffer(sample.data, dtype=np.uint8).reshape(sample.height, sample.width, -1)
    file = io.BytesIO()
    Image.fromarray(content[..., 0] if content.shape[-1] == 1 else content).save(file, "PNG")
    return file.getvalue()


def _about(splits: dict[Split, _Written]) -> list[_Entry]:
    info = splits["train"].source.info
    facts = Facts(
        version=VERSION,
        class_names=info.class_names,
        channels=3 if info.channels == 3 else 1,
        train=splits["train"].facts(),
        val=splits["val"].facts(),
    )
    text = facts.model_dump_json(indent=1).encode()
    labels = [(labels_key(split), written.stored_labels()) for split, written in splits.items()]
    return [*labels, (FACTS_KEY, text), (FACTS_CRC_KEY, b"%08x" % zlib.crc32(text))]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # some file systems refuse to sync a folder
            raise
    finally:
        os.close(descriptor)
