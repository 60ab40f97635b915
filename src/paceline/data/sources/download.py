"""Download CIFAR and Fashion-MNIST from torchvision's URLs, and verify torchvision's checksums."""

import gzip
import shutil
import socket
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Literal

from paceline.core.errors import DataError
from paceline.core.files import open_to_write
from paceline.data.files import printable

_TIMEOUT_S = 60.0
# Limit for all bytes of an archive, including files that are skipped; CIFAR's archives have 186 MB.
MAX_UNPACKED_BYTES = 512 * 2**20
# Limit for the entries of an archive; CIFAR's have 9.
MAX_MEMBERS = 100


def download_cifar(root: Path, variant: Literal["cifar10", "cifar100"], files: Sequence[str]) -> None:
    """Download CIFAR's archive and put `files` into `root` in torchvision's layout. Raise `DataError` on failure."""
    with _download_folder(root, {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}[variant]) as scratch:
        from torchvision.datasets import CIFAR10, CIFAR100
        from torchvision.datasets.utils import download_url

        # torchvision's constructor would call `extractall` and unpickle the result; extract only known names instead.
        archive = {"cifar10": CIFAR10, "cifar100": CIFAR100}[variant]
        download_url(archive.url, scratch, archive.filename, archive.tgz_md5)
        extract_files(scratch / archive.filename, archive.base_folder, files, scratch)
        # The first file comes last: its presence shows that all are complete.
        _move_files([scratch / name for name in reversed(files)], root / archive.base_folder)


def download_fashion_mnist(root: Path) -> None:
    """Download Fashion-MNIST's four files to `root` in torchvision's layout. Raise `DataError` on failure."""
    with _download_folder(root, "Fashion-MNIST") as scratch:
        from torchvision.datasets import FashionMNIST
        from torchvision.datasets.utils import download_url

        # torchvision's own download would decompress the files without a size limit.
        for name, md5 in FashionMNIST.resources:
            download_url(f"{FashionMNIST.mirrors[0]}{name}", scratch, name, md5)
        _move_files([scratch / name for name, _ in FashionMNIST.resources], root / "FashionMNIST" / "raw")


def extract_files(archive: Path, folder: str, files: Sequence[str], into: Path) -> None:
    """Extract `files` of `folder` in a gzipped tar to the folder `into`.

    Raise `DataError` if the archive has more than `MAX_MEMBERS` entries or `MAX_UNPACKED_BYTES` bytes.
    """
    with (
        gzip.open(archive) as stream,
        tarfile.open(fileobj=_SizeLimitedReader(stream, archive), mode="r|") as tar,  # type: ignore[call-overload]
    ):
        for number, member in enumerate(tar, start=1):
            if number > MAX_MEMBERS:
                raise DataError(f"{printable(archive)}: has more than {MAX_MEMBERS} entries (remove it)")
            # No path of the archive is used for writing, so links and `..` have no effect.
            content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
            parent, _, name = member.name.rpartition("/")
            if content is not None and parent == folder and name in files:
                with open_to_write(into / name, "xb") as unpacked:
                    shutil.copyfileobj(content, unpacked)


# `tarfile` trusts the sizes in headers, and a small gzip file can decompress to terabytes.
class _SizeLimitedReader:
    def __init__(self, stream: gzip.GzipFile, archive: Path) -> None:
        self._stream = stream
        self._archive = archive
        self._left = MAX_UNPACKED_BYTES

    def read(self, size: int) -> bytes:
        data = self._stream.read(min(size, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise DataError(
                f"{printable(self._archive)}: unpacks to more than {MAX_UNPACKED_BYTES:,} bytes (remove it)"
            )
        return data


@contextmanager
def _download_folder(root: Path, title: str) -> Iterator[Path]:
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_S)  # torchvision sets no timeout on its connections
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as scratch, redirect_stdout(sys.stderr):
            # Standard output is for results, and torchvision prints its progress to it.
            yield Path(scratch)
    except Exception as error:  # the fix is the same for every error
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(
            f"data.source.root: {printable(root)} has no {title}, and it could not be downloaded: {reason}; "
            f"download it elsewhere and set data.source.root to the folder that has it"
        ) from error
    finally:
        socket.setdefaulttimeout(timeout)


def _move_files(files: Sequence[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:  # renamed atomically: another node may do the same
        file.replace(folder / file.name)
