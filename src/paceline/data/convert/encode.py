"""Encode samples for a pack: an indexed JPEG record, an unchanged file, or raw pixels. Torch-free."""

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

from paceline.core.dataset import Source
from paceline.core.errors import DataError
from paceline.core.pixels import PixelFormat
from paceline.core.units import count
from paceline.data.bad_images import get_reason
from paceline.data.decode_array import decode_pixels, to_image
from paceline.data.pack.format import KIND_FILE, KIND_PIXELS, KIND_RECORD
from paceline.data.pack.jpeg_record import JpegRecord
from paceline.data.pack.reader import PackSource
from paceline.data.sources.fingerprint import get_labels
from paceline.data.sources.huggingface import HuggingFaceSource
from paceline.data.sources.image_files import ImageFileSource
from paceline.data.sources.lmdb import LmdbSource
from paceline.data.sources.webdataset import WebDatasetSource

Result = TypeVar("Result")
# Return the state of the file that a sample is read from, 0 to 2**64 - 1.
FileStateFunction = Callable[[int], int]
# Return the record of a JPEG file with a seek point every so many MCUs, or raise `ValueError` with the reason.
JpegIndexer = Callable[[bytes, int], bytes]
# Pending tasks per thread: enough that no thread waits for one slow image.
_TASKS_PER_THREAD = 4
_MAX_SIDE = 65535  # of a JPEG and of the index
_MAX_BAD_SHOWN = 5


def map_ordered(
    function: Callable[[int], Result], numbers: range, workers: int, *, chunk: int
) -> Generator[list[Result], None, None]:
    """Call `function` with each of `numbers` in `workers` threads; yield lists of `chunk` results in order.

    Raise what a call has raised. Closing the generator cancels pending calls and waits for running ones.
    """
    with ThreadPoolExecutor(workers, thread_name_prefix="pack") as pool:
        pending: deque[Future[list[Result]]] = deque()
        try:
            for first in range(0, len(numbers), chunk):
                pending.append(pool.submit(_call_each, function, numbers[first : first + chunk]))
                if len(pending) >= _TASKS_PER_THREAD * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _call_each(function: Callable[[int], Result], numbers: range) -> list[Result]:
    return [function(number) for number in numbers]


# Size and modification time of a file, hashed, show a change, as in rsync. All samples of an LMDB or of Arrow files
# have the same state.
def build_file_state_function(source: Source) -> FileStateFunction:
    """Build the function that returns the file state of a sample; 0 for pixels in memory, which the digest covers."""
    match source:
        case ImageFileSource():
            return lambda index: _hash_states(_describe_file(source.get_path(index)))
        case PackSource():
            crc32s = source.index.splits[source.info.split].crc32s
            return lambda index: int(crc32s[index])
        case WebDatasetSource(files=files, tar_ends=ends, starts=starts):
            tars = [_describe_file(path) for path in files.paths]
            return lambda index: _hash_states(tars[int(np.searchsorted(ends, index, "right"))], str(starts[index]))
        case LmdbSource(path=path):
            return _build_constant_function([path])
        case HuggingFaceSource(images=images):
            return _build_constant_function([file["filename"] for file in images.cache_files])
    return lambda index: 0


def _build_constant_function(paths: Sequence[str]) -> FileStateFunction:
    state = _hash_states(*(_describe_file(path) for path in paths))
    return lambda index: state


def _describe_file(path: str | Path) -> str:
    try:
        status = Path(path).stat()
    except (OSError, ValueError):  # ValueError for a name with a null byte
        return "none"
    return f"{status.st_size} {status.st_mtime_ns}"


def _hash_states(*states: str) -> int:
    return int.from_bytes(hashlib.blake2b("\n".join(states).encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class EncodedSample:
    """A sample as stored in a pack."""

    kind: int
    data: bytes
    height: int  # of the upright image; 0 if unknown or above 65,535
    width: int
    label: int
    unchanged_reason: str = ""  # why a file is stored unchanged, or with `is_bad`, why it cannot be decoded
    is_bad: bool = False
    file_state: int = 0  # see `build_file_state_function`


# A baseline JPEG becomes a record with identical pixels; other files are stored unchanged. With `resize`, images with a
# longer short side are scaled down and saved as JPEG before indexing, and so is every decodable file that cannot become
# a record.
@dataclass(frozen=True)
class SampleEncoder:
    """Encode samples, from any number of threads. Options are those of `pack_writer.PackOptions`."""

    index: JpegIndexer | None  # None without the native core
    every: int
    resize: int | None
    quality: int
    keeps_files: bool = False  # store every file unchanged after the same checks

    def __call__(self, source: Source, number: int) -> EncodedSample:
        """Encode sample `number`; one that cannot be read or decoded is stored unchanged, with `is_bad`.

        Raise `DataError` for pixels of more than 65,535 rows or columns, or if an unreadable sample has no label.
        """
        try:
            content, label = source.read(number)
        except DataError as error:
            return EncodedSample(
                KIND_FILE, b"", 0, 0, _get_label(source, number, error), get_reason(error), is_bad=True
            )
        if not isinstance(content, bytes):
            height, width = content.shape[:2]
            if max(height, width) > _MAX_SIDE:
                raise DataError(f"{source.name_of(number)}: is {height}x{width} pixels, more than a pack holds raw")
            return EncodedSample(
                KIND_PIXELS,
                np.ascontiguousarray(content, content.dtype.newbyteorder("<")).tobytes(),
                height,
                width,
                label,
            )
        form = source.info.pixel_format
        if self.resize is None:
            return self._encode_unchanged_size(content, label, form)
        return self._encode_resized(content, label, form, self.resize)

    def _encode_unchanged_size(self, file: bytes, label: int, form: PixelFormat) -> EncodedSample:
        record, reason = self._index_jpeg(file) if form.is_photo else (None, "it is not 8-bit gray or RGB")
        if record is not None and self.keeps_files:
            return EncodedSample(KIND_FILE, file, *JpegRecord.from_bytes(record).size, label)
        if record is not None:
            return _encode_record(record, label)
        return _encode_file(file, label, form, reason)

    def _encode_resized(self, file: bytes, label: int, form: PixelFormat, resize: int) -> EncodedSample:
        record, _ = self._index_jpeg(file)
        # It is small enough already, and saving it again could only lose quality.
        if record is not None and min(JpegRecord.from_bytes(record).size) <= resize:
            return _encode_record(record, label)
        try:
            image = to_image(decode_pixels(file, form, name=""))
        except DataError as error:
            return EncodedSample(KIND_FILE, file, 0, 0, label, get_reason(error), is_bad=True)
        try:
            smaller = _save_jpeg(_scale_down(image, resize), self.quality)
        except (OSError, ValueError):  # exceeds JPEG's 65,535 pixels
            return _encode_file(file, label, form, "it is too long for a JPEG")
        return self._encode_unchanged_size(smaller, label, form)

    def _index_jpeg(self, file: bytes) -> tuple[bytes | None, str]:
        # (record, ""), or (None, reason).
        if not file.startswith(b"\xff\xd8"):
            return None, "it is no JPEG"
        if self.index is None:
            return None, "the native core is not there"
        try:
            return self.index(file, self.every), ""
        except ValueError as error:
            return None, str(error)


def build_bad_images_error(bad: Sequence[tuple[str, str]]) -> DataError:
    """Build the error for images that cannot be read, from (name, reason) of each."""
    named = ", ".join(f"{name} ({reason})" for name, reason in bad[:_MAX_BAD_SHOWN])
    more = ", ..." if len(bad) > _MAX_BAD_SHOWN else ""
    return DataError(
        f"{count(len(bad), 'image')} cannot be read: {named}{more}; remove or replace them, or set "
        f"data.on_bad_image=skip"
    )


def _get_label(source: Source, number: int, error: DataError) -> int:
    labels = get_labels(source)
    if labels is None:
        raise error  # of a plugin, whose labels come only with the images
    return int(labels[number])


def _encode_record(record: bytes, label: int) -> EncodedSample:
    return EncodedSample(KIND_RECORD, record, *JpegRecord.from_bytes(record).size, label)


def _encode_file(file: bytes, label: int, form: PixelFormat, unchanged_reason: str) -> EncodedSample:
    # Only decoding shows whether the file is readable, and its upright size.
    try:
        height, width = decode_pixels(file, form, name="").shape[:2]
    except DataError as error:
        return EncodedSample(KIND_FILE, file, 0, 0, label, get_reason(error), is_bad=True)
    if max(width, height) > _MAX_SIDE:
        height = width = 0
    return EncodedSample(KIND_FILE, file, height, width, label, unchanged_reason)


def _scale_down(image: Image.Image, resize: int) -> Image.Image:
    width, height = image.size
    short = min(width, height)
    if short <= resize:
        return image
    size = (round(width * resize / short), round(height * resize / short))
    return image.resize(size, Image.Resampling.BILINEAR)  # Pillow antialiases, like resizing in training


def _save_jpeg(image: Image.Image, quality: int) -> bytes:
    file = BytesIO()
    options = {"subsampling": "4:2:0"} if image.mode == "RGB" else {}
    # The standard's Huffman tables (not optimized): decoders build them once for all images.
    image.save(file, "JPEG", quality=quality, optimize=False, **options)
    return file.getvalue()
