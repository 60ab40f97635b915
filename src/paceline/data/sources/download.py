"""Fetch the small data sets, by torchvision's addresses and checksums. Imports torchvision only when it does.

Of CIFAR's archive only the files that are needed are unpacked, by name: torchvision's own constructor would unpack
it with `extractall` and then unpickle what it got.
"""

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
from paceline.data.sources.places import printable

_STALLED_S = 60.0
MAX_UNPACKED_BYTES = 512 * 2**20
"""The most an archive may unpack to, what is left out included; CIFAR's are 186 MB."""
MAX_MEMBERS = 100
"""The most entries an archive may have; CIFAR's have 9."""


def download_cifar(root: Path, edition: Literal["cifar10", "cifar100"], files: Sequence[str]) -> None:
    """Fetch CIFAR's archive, check its MD5, and put `files` of it in `root`, in torchvision's layout.

    The first of `files` comes last, so that its presence says that all are there. Raise `DataError` naming `root`
    and the reason when that is not possible.
    """
    with _fetching(root, {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}[edition]) as scratch:
        from torchvision.datasets import CIFAR10, CIFAR100
        from torchvision.datasets.utils import download_url

        archive = {"cifar10": CIFAR10, "cifar100": CIFAR100}[edition]
        download_url(archive.url, scratch, archive.filename, archive.tgz_md5)
        unpack(scratch / archive.filename, archive.base_folder, files, scratch)
        _move([scratch / name for name in reversed(files)], root / archive.base_folder)


def download_fashion_mnist(root: Path) -> None:
    """Fetch Fashion-MNIST's four files, check their MD5s, and put them in `root`, in torchvision's layout.

    Raise `DataError` naming `root` and the reason when that is not possible.
    """
    with _fetching(root, "Fashion-MNIST") as scratch:
        from torchvision.datasets import FashionMNIST
        from torchvision.datasets.utils import download_url

        # Its own download would unpack what it fetched, however much that is.
        for name, md5 in FashionMNIST.resources:
            download_url(f"{FashionMNIST.mirrors[0]}{name}", scratch, name, md5)
        _move([scratch / name for name, _ in FashionMNIST.resources], root / "FashionMNIST" / "raw")


def unpack(archive: Path, folder: str, files: Sequence[str], into: Path) -> None:
    """Write those `files` of `folder` in a gzipped tar to `into`, under their own names and nothing else.

    Links, devices and paths elsewhere are never followed or made, for no name in the archive is used. Raise
    `DataError` for an archive that has more than `MAX_MEMBERS` entries or unpacks to more than `MAX_UNPACKED_BYTES`.
    """
    with (
        gzip.open(archive) as stream,
        tarfile.open(fileobj=_Limited(stream, archive), mode="r|") as tar,  # type: ignore[call-overload]
    ):
        for number, member in enumerate(tar, start=1):
            if number > MAX_MEMBERS:
                raise DataError(f"{printable(archive)}: has more than {MAX_MEMBERS} entries (remove it)")
            content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
            above, _, name = member.name.rpartition("/")
            if content is not None and above == folder and name in files:
                with open_to_write(into / name, "xb") as unpacked:
                    shutil.copyfileobj(content, unpacked)


class _Limited:
    """Read a stream up to `MAX_UNPACKED_BYTES`; headers that lie about sizes do not matter to what was read."""

    def __init__(self, stream: gzip.GzipFile, archive: Path) -> None:
        self._stream = stream
        self._archive = archive
        self._left = MAX_UNPACKED_BYTES

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes. Raise `DataError` when that is more than is left."""
        data = self._stream.read(min(size, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise DataError(
                f"{printable(self._archive)}: unpacks to more than {MAX_UNPACKED_BYTES:,} bytes (remove it)"
            )
        return data


@contextmanager
def _fetching(root: Path, title: str) -> Iterator[Path]:
    """Give a scratch folder in `root`, removed afterwards; a stalled connection ends after a minute."""
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_STALLED_S)  # torchvision gives its connections none
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as scratch, redirect_stdout(sys.stderr):
            yield Path(scratch)
    except Exception as error:  # whatever it was, the user's part is the same
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(
            f"data.source.root: {printable(root)} has no {title}, and it could not be downloaded: {reason}; "
            f"fetch it elsewhere and set data.source.root to the folder that has it"
        ) from error
    finally:
        socket.setdefaulttimeout(timeout)


def _move(files: Sequence[Path], folder: Path) -> None:
    """Put `files` in `folder`, each at once or not at all: another node may be doing the same."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        file.replace(folder / file.name)
