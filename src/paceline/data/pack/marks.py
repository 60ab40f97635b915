"""Whether what a sample was read from is still what it was: a mark of it, which is another when the file is another.

A file is its size and when it was last written, as for rsync: copied again with its time it is the same, and nothing is
read to find out. A tar, an LMDB and Arrow files stand for all samples in them.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from paceline.core.dataset import Source
from paceline.data.pack.reader import PackSource
from paceline.data.sources.encoded import EncodedSource
from paceline.data.sources.huggingface import HuggingFaceSource
from paceline.data.sources.lmdb import LmdbSource
from paceline.data.sources.webdataset import WebDatasetSource

Marker = Callable[[int], int]
"""Give the mark of a sample, 0 to 2**64 - 1."""


def build_marker(source: Source) -> Marker:
    """Return what marks the samples of a split. Those of pixels in memory, which its digest tells apart, are all 0."""
    match source:
        case EncodedSource():
            return lambda index: _mark(_state(source.path_of(index)))
        case PackSource():
            crc32s = source.index.splits[source.info.split].crc32s
            return lambda index: int(crc32s[index])
        case WebDatasetSource(files=files, tar_ends=ends, starts=starts):
            tars = [_state(path) for path in files.paths]
            return lambda index: _mark(tars[int(np.searchsorted(ends, index, "right"))], str(starts[index]))
        case LmdbSource(path=path):
            return _of_all([path])
        case HuggingFaceSource(images=images):
            return _of_all([file["filename"] for file in images.cache_files])
    return lambda index: 0


def _of_all(paths: Sequence[str]) -> Marker:
    mark = _mark(*(_state(path) for path in paths))
    return lambda index: mark


def _state(path: str | Path) -> str:
    try:
        found = Path(path).stat()
    except (OSError, ValueError):  # the latter for a name with a null byte, which no file has
        return "none"
    return f"{found.st_size} {found.st_mtime_ns}"


def _mark(*states: str) -> int:
    return int.from_bytes(hashlib.blake2b("\n".join(states).encode(), digest_size=8).digest(), "little")
