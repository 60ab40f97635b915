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
from paceline.inference.listing import Unread

# Size of the largest image that is decoded: 128 million pixels, four channels of 16 bits, uncompressed.
_MOST_BYTES = 2**30
_PART_BYTES = 2**20


@dataclass(frozen=True)
class Picture:
    """An image of the model's input size, uint8 [C, H, W], and the path of its file."""

    path: Path
    pixels: Tensor


def read_pictures(
    classifier: Classifier, paths: Iterable[Path | Unread], *, threads: int, ahead: int
) -> Generator[Picture | Unread, None, None]:
    """Yield the image of each of `paths` in order, preprocessed as in evaluation.

    An image that cannot be read or decoded becomes an `Unread` in its place. Prefetch up to `ahead` images.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="picture")
    waiting: deque[Future[Picture | Unread]] = deque()
    try:
        for path in paths:
            waiting.append(pool.submit(partial(_read, classifier, path)))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)  # the consumer may stop early


def _read(classifier: Classifier, path: Path | Unread) -> Picture | Unread:
    if isinstance(path, Unread):
        return path
    try:
        return Picture(path, classifier.image(_content(path), one_line(path)))
    except ImageError as error:
        return Unread(path, f"{error.reason}; remove it or replace it")
    except DataError as error:
        return Unread(path, str(error))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return Unread(path, f"cannot be read: {reason}; correct its name, or leave it out")


def _content(path: Path) -> bytes:
    """Return the content of a file or pipe. Raise `ValueError` if it is larger than any image."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            raise ValueError("is a device")
        if status.st_size <= _MOST_BYTES:
            chunks = iter(partial(file.read, max(status.st_size, _PART_BYTES)), b"")
            content = b"".join(islice(chunks, 1 + _MOST_BYTES // _PART_BYTES))
            if len(content) <= _MOST_BYTES:
                return content
    raise ValueError(f"has more than {_MOST_BYTES / 2**30:g} GiB, too large for an image")
