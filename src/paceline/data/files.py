"""File helpers of the data package: paths as users type them, image extensions, syncs, and random access."""

import errno
import os
import resource
import stat
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import IO, Final

# Browsers and Windows also use the last three.
JPEG_EXTENSIONS: Final = frozenset({"jpg", "jpeg", "jpe", "jfif", "jfi"})
IMAGE_EXTENSIONS: Final = JPEG_EXTENSIONS | {
    *("png", "bmp", "gif", "webp", "tif", "tiff", "ppm", "pgm", "heic", "heif", "avif", "jxl")
}
# Beside 8-bit images, such files are often masks or embeddings.
_ARRAY_EXTENSION: Final = "npy"
# Larger samples are treated as damage.
MAX_SAMPLE_BYTES = 2**30
_MAX_EXTENSIONS_SHOWN: Final = 5
_MAX_OPEN_FILES = 256


def expand_path(text: str) -> Path:
    """Expand `~` in a path if there is a home folder."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - the method raises without a home folder


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder; False if that cannot be determined."""
    return os.path.isdir(path)  # noqa: PTH112 - the method raises if a parent folder is not searchable


def is_file(path: Path) -> bool:
    """Return whether `path` is a regular file; False if that cannot be determined."""
    return os.path.isfile(path)  # noqa: PTH113 - as above


def printable(name: str | Path) -> str:
    r"""Escape characters that cannot be printed on one line or encoded: `a\n`, `\udcff`."""
    text = str(name)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """Escape characters that cannot be printed or encoded, except line ends."""
    return "\n".join(map(printable, text.split("\n")))


def has_image_extension(name: str, *, arrays: bool = False) -> bool:
    """Return whether `name` has a stem and an extension of images; with `arrays`, .npy is one."""
    stem, dot, extension = name.rpartition(".")
    extension = extension.lower()
    return bool(stem and dot) and (extension in IMAGE_EXTENSIONS or (arrays and extension == _ARRAY_EXTENSION))


def summarize_extensions(names: Iterable[str]) -> str:
    """Count file names by extension, most frequent first: `12 .heic, 4 .txt, 1 Thumbs.db`.

    An extension that only one name has is shown as that name.
    """
    by_extension: dict[str, Counter[str]] = {}
    for name in names:
        stem, dot, extension = name.rpartition(".")
        by_extension.setdefault(f".{extension.lower()}" if stem and dot else "", Counter())[name] += 1
    # Negative counts sort the most frequent first, and equal ones by label.
    counts = sorted(
        (-same_extension.total(), _format_extension(extension, same_extension))
        for extension, same_extension in by_extension.items()
    )
    rest = -sum(number for number, _ in counts[_MAX_EXTENSIONS_SHOWN:])
    parts = [f"{-number:,} {label}" for number, label in counts[:_MAX_EXTENSIONS_SHOWN]]
    return ", ".join([*parts, *([f"{rest:,} others"] if rest else [])])


def _format_extension(extension: str, names: Counter[str]) -> str:
    if len(names) == 1:
        return printable(next(iter(names)))
    return printable(extension) if extension else "without an extension"


def fsync_file(file: IO[bytes]) -> None:
    """Flush an open file to disk."""
    file.flush()
    os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # some file systems refuse to sync a folder
            raise
    finally:
        os.close(descriptor)


# Files are opened on first use and read with `pread`: no file is mapped, so a truncated file is an error and not a
# signal (SIGBUS), and no shared file position exists, so a forked process can use its parent's descriptors.
class RandomAccessFiles:
    """Read files of known sizes by number. All errors are `OSError`."""

    def __init__(self, paths: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        assert len(paths) == len(sizes), f"{len(paths)} paths for {len(sizes)} sizes"
        self.paths = paths
        self.sizes = sizes
        self._open = _build_file_opener()

    def read(self, number: int, start: int, length: int) -> bytes:
        """Return `length` bytes of file `number` from byte `start` on."""
        file = self._open(self.paths[number], self.sizes[number])
        data = os.pread(file.descriptor, length, start)
        while len(data) < length:  # Linux returns at most 2 GiB per call, network file systems less
            more = os.pread(file.descriptor, length - len(data), start + len(data))
            if not more:
                raise OSError(errno.EIO, f"ends before byte {start + length:,}")
            data += more
        return data

    def __getstate__(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return self.paths, self.sizes

    def __setstate__(self, state: tuple[tuple[str, ...], tuple[int, ...]]) -> None:
        self.paths, self.sizes = state
        self._open = _build_file_opener()


# Closing by reference count: no thread closes a descriptor that another thread still uses.
class OpenFile:
    """An open regular file, closed when the last reference goes."""

    descriptor = -1

    def __init__(self, path: str, expected_bytes: int | None = None) -> None:
        # Without O_NONBLOCK, opening a pipe in place of the file would hang the run.
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self.descriptor)
        self.num_bytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        if expected_bytes not in (None, self.num_bytes):
            raise OSError(errno.ESTALE, f"has {self.num_bytes:,} bytes, and had {expected_bytes:,} when it was listed")

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when Python ends
        if self.descriptor >= 0:  # else it could not be opened
            close(self.descriptor)


def _build_file_opener() -> Callable[[str, int], OpenFile]:
    # No POSIX_FADV_RANDOM: it gained nothing for shuffled images on a cold disk, and cost two thirds of the sequential
    # throughput (LMDB and tars of 110 kB images).
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # use at most a quarter of the process's limit
    return lru_cache(_MAX_OPEN_FILES if limit == resource.RLIM_INFINITY else max(1, min(_MAX_OPEN_FILES, limit // 4)))(
        OpenFile
    )
