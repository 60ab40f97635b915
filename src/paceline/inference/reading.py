"""Read, decode and resize images in threads, ahead of the model and in order."""

import os
import stat
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from torch import Tensor

from paceline.core.errors import DataError
from paceline.data.bad import ImageError
from paceline.data.sources.places import printable as one_line
from paceline.inference.classifier import Classifier
from paceline.inference.listing import UnreadableImage

# Size of the largest image that is decoded: 128 million pixels, four channels of 16 bits, uncompressed.
_MAX_IMAGE_BYTES = 2**30
_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class InputImage:
    """An image of the model's input size, uint8 [C, H, W], and the path of its file."""

    path: Path
    pixels: Tensor


def read_images(
    classifier: Classifier, paths: Iterable[Path | UnreadableImage], *, threads: int, num_ahead: int
) -> Generator[InputImage | UnreadableImage, None, None]:
    """Yield the image of each of `paths` in order, preprocessed as in evaluation.

    An image that cannot be read or decoded becomes an `UnreadableImage` in its place. Prefetch up to `num_ahead` images.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="picture")
    waiting: deque[Future[InputImage | UnreadableImage]] = deque()
    try:
        for path in paths:
            waiting.append(pool.submit(partial(_read_image, classifier, path)))
            if len(waiting) > num_ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)  # the consumer may stop early


def _read_image(classifier: Classifier, path: Path | UnreadableImage) -> InputImage | UnreadableImage:
    if isinstance(path, UnreadableImage):
        return path
    try:
        return InputImage(path, classifier.image(_read_content(path), one_line(path)))
    except ImageError as error:
        return UnreadableImage(path, f"{error.reason}; remove it or replace it")
    except DataError as error:
        return UnreadableImage(path, str(error))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return UnreadableImage(path, f"cannot be read: {reason}; correct its name, or leave it out")


def _read_content(path: Path) -> bytes:
    """Return the content of a file or pipe. Raise `ValueError` if it is larger than any image."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            raise ValueError("is a device")
        if status.st_size <= _MAX_IMAGE_BYTES:
            chunks = iter(partial(file.read, max(status.st_size, _CHUNK_BYTES)), b"")
            content = b"".join(islice(chunks, 1 + _MAX_IMAGE_BYTES // _CHUNK_BYTES))
            if len(content) <= _MAX_IMAGE_BYTES:
                return content
    raise ValueError(f"has more than {_MAX_IMAGE_BYTES / 2**30:g} GiB, too large for an image")
