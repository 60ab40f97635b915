"""Detect whether the file of a sample has changed since it was packed, by a mark of its state."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from paceline.core.dataset import Source
from paceline.data.pack.reader import PackSource
from paceline.data.sources.encoded import ImageFileSource
from paceline.data.sources.huggingface import HuggingFaceSource
from paceline.data.sources.lmdb import LmdbSource
from paceline.data.sources.webdataset import WebDatasetSource

# A mark of a file is a hash of its size and modification time, as in rsync. Samples in tars, LMDBs and Arrow files
# share the mark of the whole file.
#
# Return the mark of a sample, 0 to 2**64 - 1.
MarkFunction = Callable[[int], int]


def build_mark_function(source: Source) -> MarkFunction:
    """Build the function that returns the marks of a split; 0 for pixels in memory, which the digest identifies."""
    match source:
        case ImageFileSource():
            return lambda index: _hash_mark(_describe_file(source.get_path(index)))
        case PackSource():
            crc32s = source.index.splits[source.info.split].crc32s
            return lambda index: int(crc32s[index])
        case WebDatasetSource(files=files, tar_ends=ends, starts=starts):
            tars = [_describe_file(path) for path in files.paths]
            return lambda index: _hash_mark(tars[int(np.searchsorted(ends, index, "right"))], str(starts[index]))
        case LmdbSource(path=path):
            return _mark_files([path])
        case HuggingFaceSource(images=images):
            return _mark_files([file["filename"] for file in images.cache_files])
    return lambda index: 0


def _mark_files(paths: Sequence[str]) -> MarkFunction:
    mark = _hash_mark(*(_describe_file(path) for path in paths))
    return lambda index: mark


def _describe_file(path: str | Path) -> str:
    try:
        status = Path(path).stat()
    except (OSError, ValueError):  # ValueError for a name with a null byte
        return "none"
    return f"{status.st_size} {status.st_mtime_ns}"


def _hash_mark(*states: str) -> int:
    return int.from_bytes(hashlib.blake2b("\n".join(states).encode(), digest_size=8).digest(), "little")
