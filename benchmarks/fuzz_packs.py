"""Packs and records as `fuzz.py` reads them: by Python, and by the native core where there is one."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets
from paceline.core.errors import PacelineError
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.native import load_native
from paceline.data.pack.format import KIND_RECORD, align_offset
from paceline.data.pack.jpeg_record import restore_jpeg
from paceline.data.pack.reader import PackSource, open_pack
from paceline.data.pack.shards import HEADER_BYTES
from paceline.data.sources.folder import load_folder
from paceline.recipe.schema.source import Folder


def packs(scratch: Path, images: list[bytes]) -> list[bytes]:
    """Return a pack of small photographs and one of pixels."""
    for number, content in enumerate(images):
        path = scratch / "photos" / ("val" if number % 3 == 2 else "train") / f"class {number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    info = DatasetInfo("digits", "train", 3, ("a", "b"), 1, (4, 3), (0.5,), (0.25,))
    digits = ArraySource(info, np.arange(36, dtype=np.uint8).reshape(3, 4, 3, 1), np.array([0, 1, 0]))
    made = []
    for datasets in (load_folder(Folder(root=str(scratch / "photos"))), Datasets(digits, digits)):
        write_pack(datasets, scratch / "made.pack", PackOptions(overwrite=True), lambda done, total: None, workers=1)
        made.append((scratch / "made.pack").read_bytes())
    return made


def read_pack(folder: Path, read_all: Callable[[Datasets], None], *, repair: bool) -> None:
    """Open a pack, `read_all` of it, and decode it, as training does.

    With `repair` its lengths and checksums are made to fit first.
    """
    path = folder / "a.pack"
    if repair:
        path.write_bytes(_repair_pack(path.read_bytes()))
    found = open_pack(path)
    read_all(found)
    for source in (found.train, found.val):
        if isinstance(source, PackSource):
            _decode_all(source)


def _decode_all(source: PackSource) -> None:
    """Have the native core decode all records from the pack's memory, no checksum asked, as the native loader does."""
    core, count, channels = load_native(), len(source), source.info.channels
    if core is None:
        return
    shard_of, offsets, lengths = source.locate(np.arange(count))
    lengths[(source.kinds != KIND_RECORD) | (source.heights == 0) | (source.widths == 0)] = 0
    boxes = np.zeros((count, 4))
    boxes[:, 2], boxes[:, 3] = source.heights, source.widths
    out, status = np.zeros((count, channels, 32, 32), dtype=np.uint8), np.zeros(count, dtype=np.int32)
    shards = [source.files.memory(shard) for shard in range(len(source.files))]
    pool = core.Pool(1)
    task = pool.submit(
        shards, shard_of, offsets, lengths, boxes, np.arange(count) % 2 == 0, True, 32, channels, out, status
    )
    assert task.wait(60), "a batch of an image or two takes a minute"
    assert all(core.reason(int(each)) for each in status)
    pool.close()


def _repair_pack(content: bytes) -> bytes:
    header = bytearray(content[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
    start = align_offset(HEADER_BYTES + int.from_bytes(header[40:48], "little"))
    index = content[start:]
    struct.pack_into("<Q", header, 32, len(content))
    struct.pack_into("<QI", header, 48, len(index), zlib.crc32(index))
    struct.pack_into("<I", header, 12, 0)
    struct.pack_into("<I", header, 12, zlib.crc32(header))
    return bytes(header) + content[HEADER_BYTES:]


def records(scratch: Path, photos: bytes) -> list[bytes]:
    """Return the records in a pack of photographs, and others; without the native core there is only what is none."""
    core, path = load_native(), scratch / "photos.pack"
    path.write_bytes(photos)
    train = open_pack(path).train
    assert isinstance(train, PackSource)
    found = [train.read_stored(int(each)) for each in np.flatnonzero(train.kinds == KIND_RECORD)]
    if core is not None:
        found += [core.index_jpeg(each, every) for each in _jpegs() for every in (1, 8)]
    return found or [b"PJ1\0" + bytes(60)]


def _jpegs() -> list[bytes]:
    """Return JPEGs of every way to sample colors that Pillow writes, in one scan and in several, and gray ones."""
    made = []
    for subsampling in range(3):
        for mode, options in (("RGB", {}), ("RGB", {"progressive": True}), ("RGB", {"optimize": True}), ("L", {})):
            file = io.BytesIO()
            image = Image.effect_noise((61, 45), 20 + 30 * subsampling).convert(mode)
            image.save(file, "JPEG", subsampling=subsampling, quality=60 + 15 * subsampling, **options)
            made.append(file.getvalue())
    return made


def read_record(folder: Path) -> None:
    """Restore the JPEG file of a record, and decode the record."""
    record, refused = (folder / "record").read_bytes(), []
    for read in (restore_jpeg, _decode_record):
        try:
            read(record)
        except ValueError as error:
            refused.append(str(error))
    if refused:
        raise PacelineError(refused[0])


def _decode_record(record: bytes) -> None:
    """Have the native core decode a record, whole and a part of it, in colors and in gray."""
    core = load_native()
    if core is None:
        return
    height, width, _ = core.size_of(record)
    box = (0.2 * height, 0.1 * width, 0.7 * height, 0.8 * width)
    for channels in (1, 3):
        core.decode_into(record, channels, np.empty((height, width, channels), dtype=np.uint8))
        out = np.empty((channels, 32, 32), dtype=np.uint8)
        core.decode_crop_into(record, box, channels == 1, True, 32, channels, out)
