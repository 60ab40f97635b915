"""From paths to what a network is shown: files read, decoded and sized by several threads, ahead of it and in order."""

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

_MOST_BYTES = 2**30
"""What the largest image that is decoded takes: 128 million pixels of four channels of 16 bits, not compressed."""
_PART_BYTES = 2**20


@dataclass(frozen=True)
class Picture:
    """An image of the network's size, uint8 [C, H, W], and the path of its file."""

    path: Path
    pixels: Tensor


def read_pictures(
    classifier: Classifier, paths: Iterable[Path | Unread], *, threads: int, ahead: int
) -> Generator[Picture | Unread, None, None]:
    """Give the image of each of `paths` as evaluation would show it to the network, in their order.

    What cannot be read or decoded is an `Unread` in its place. Up to `ahead` images are made before they are asked for.
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
        pool.shutdown(cancel_futures=True)


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
    """Return what is in a file, or comes through a pipe. Raise `ValueError` for more than an image can be."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            raise ValueError("is a device")
        if status.st_size <= _MOST_BYTES:
            parts = iter(partial(file.read, max(status.st_size, _PART_BYTES)), b"")
            content = b"".join(islice(parts, 1 + _MOST_BYTES // _PART_BYTES))
            if len(content) <= _MOST_BYTES:
                return content
    raise ValueError(f"has more than {_MOST_BYTES / 2**30:g} GiB, and is no image")
