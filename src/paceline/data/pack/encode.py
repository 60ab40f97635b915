"""From a sample of a source to what a pack holds of it: a record, a file as it is, or pixels. Torch-free.

A baseline JPEG becomes a record, which changes no pixel. Every other file is kept whole, and why is told: it is read as
before, at the speed of before. With `resize` an image whose short side is longer is scaled down, antialiased, and saved
as JPEG with the standard's Huffman tables (so that decoders build them once for all images) before it is indexed; and
so is one that would have been kept whole though it can be decoded. What can become a record at its size stays as it is:
saving it again could only lose. Nothing is written here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Literal

import numpy as np
from PIL import Image

from paceline.core.dataset import Source
from paceline.core.errors import DataError
from paceline.core.units import count
from paceline.data.bad import BadImage
from paceline.data.decode import decode
from paceline.data.pack.format import KIND_FILE, KIND_PIXELS, KIND_RECORD
from paceline.data.pack.reader import PackSource
from paceline.data.pack.record import Record
from paceline.data.sources.encoded import EncodedSource
from paceline.data.sources.huggingface import HuggingFaceSource
from paceline.data.sources.lmdb import LmdbSource
from paceline.data.sources.webdataset import WebDatasetSource

Indexer = Callable[[bytes, int], bytes]
"""Make the record of a JPEG file, with a seek point every so many MCUs, or raise `ValueError` with the reason."""
_MAX_SIDE = 65535
_NUM_NAMED = 5


@dataclass(frozen=True)
class Encoded:
    """What a pack holds of a sample: `data` of a kind, its upright size (0 where unknown or too large to tell), label.

    `kept` says why a file was kept whole, "" where it was not. `is_bad` says that it cannot be decoded, and why is what
    `kept` says. `mark` is that of what it was read from (`marks`).
    """

    kind: int
    data: bytes
    height: int
    width: int
    label: int
    kept: str = ""
    is_bad: bool = False
    mark: int = 0


@dataclass(frozen=True)
class Encoder:
    """Turn samples into what a pack holds of them; any number of threads may, and wait for one another nowhere long.

    `index` is the native core's, or None without it. `resize` and `quality` are as in `writer.PackOptions`. What
    `keeps_files` makes no records: it says of each file whether a pack could read it, and leaves it as it is.
    """

    index: Indexer | None
    every: int
    resize: int | None
    quality: int
    keeps_files: bool = False

    def __call__(self, source: Source, number: int) -> Encoded:
        """Return what is held of sample `number`. A sample that cannot be read or decoded is kept as it is, as bad."""
        try:
            content, label = source.read(number)
        except DataError as error:
            return Encoded(KIND_FILE, b"", 0, 0, _label_of(source, number, error), _reason(error), is_bad=True)
        if not isinstance(content, bytes):
            height, width = content.shape[:2]
            if max(height, width) > _MAX_SIDE:
                raise DataError(f"{source.name_of(number)}: is {height}x{width} pixels, more than a pack holds raw")
            return Encoded(KIND_PIXELS, np.ascontiguousarray(content).tobytes(), height, width, label)
        channels: Literal[1, 3] = 3 if source.info.channels == 3 else 1
        if self.resize is None:
            return self._kept(content, label, channels)
        return self._resized(content, label, channels, self.resize)

    def _kept(self, file: bytes, label: int, channels: Literal[1, 3]) -> Encoded:
        record, reason = self._record(file)
        if record is not None and self.keeps_files:
            return Encoded(KIND_FILE, file, *Record.parsed(record).size, label)
        if record is not None:
            return _of_record(record, label)
        return _of_file(file, label, channels, reason)

    def _resized(self, file: bytes, label: int, channels: Literal[1, 3], resize: int) -> Encoded:
        record, _ = self._record(file)
        if record is not None and min(Record.parsed(record).size) <= resize:
            return _of_record(record, label)
        try:
            image = decode(file, channels=channels, name="")
        except DataError as error:
            return Encoded(KIND_FILE, file, 0, 0, label, _reason(error), is_bad=True)
        try:
            smaller = _jpeg(_scaled(image, resize), self.quality)
        except (OSError, ValueError):  # longer than a JPEG can be
            return _of_file(file, label, channels, "it is too long for a JPEG")
        return self._kept(smaller, label, channels)

    def _record(self, file: bytes) -> tuple[bytes | None, str]:
        """Return the record of a file, or why there is none."""
        if not file.startswith(b"\xff\xd8"):
            return None, "it is no JPEG"
        if self.index is None:
            return None, "the native core is not there"
        try:
            return self.index(file, self.every), ""
        except ValueError as error:
            return None, str(error)


def refusal_of(bad: Sequence[tuple[str, str]]) -> DataError:
    """Return the error for images that cannot be read: (name, reason) of each."""
    named = ", ".join(f"{name} ({reason})" for name, reason in bad[:_NUM_NAMED])
    more = ", ..." if len(bad) > _NUM_NAMED else ""
    return DataError(
        f"{count(len(bad), 'image')} cannot be read: {named}{more}; remove or replace them, or set "
        f"data.on_bad_image=skip"
    )


def _label_of(source: Source, number: int, error: DataError) -> int:
    """Return the label of a sample that cannot be read. Raise `error` where that cannot be had without reading it."""
    match source:
        case (
            EncodedSource(labels=labels)
            | PackSource(labels=labels)
            | LmdbSource(labels=labels)
            | WebDatasetSource(labels=labels)
            | HuggingFaceSource(labels=labels)
        ):
            return int(labels[number])
    raise error


def _of_record(record: bytes, label: int) -> Encoded:
    return Encoded(KIND_RECORD, record, *Record.parsed(record).size, label)


def _of_file(file: bytes, label: int, channels: Literal[1, 3], kept: str) -> Encoded:
    """Return a file as it is. It is decoded, as that alone says whether it can be, and how large it is upright."""
    try:
        width, height = decode(file, channels=channels, name="").size
    except DataError as error:
        return Encoded(KIND_FILE, file, 0, 0, label, _reason(error), is_bad=True)
    if max(width, height) > _MAX_SIDE:
        height = width = 0
    return Encoded(KIND_FILE, file, height, width, label, kept)


def _scaled(image: Image.Image, resize: int) -> Image.Image:
    """Return an image whose short side is at most `resize`; triangle filter, antialiased, as training resizes."""
    width, height = image.size
    short = min(width, height)
    if short <= resize:
        return image
    size = (round(width * resize / short), round(height * resize / short))
    return image.resize(size, Image.Resampling.BILINEAR)


def _jpeg(image: Image.Image, quality: int) -> bytes:
    file = BytesIO()
    options = {"subsampling": "4:2:0"} if image.mode == "RGB" else {}
    image.save(file, "JPEG", quality=quality, optimize=False, **options)
    return file.getvalue()


def _reason(error: DataError) -> str:
    return BadImage.of(0, "", error).reason
