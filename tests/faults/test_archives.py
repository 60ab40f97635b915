"""A malicious archive in place of a dataset does not escape its folder, fill the disk or redirect a write."""

import gzip
import hashlib
import io
import resource
import signal
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from paceline.core.errors import DataError
from paceline.data.sources import download
from paceline.data.sources.cifar import load_cifar
from paceline.data.sources.download import MAX_MEMBERS, MAX_UNPACKED_BYTES, download_cifar
from paceline.data.sources.fashion_mnist import load_fashion_mnist
from paceline.recipe.schema.source import Cifar10, FashionMnist

INSIDE = "cifar-10-batches-py"
FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")
Craft = Callable[[tarfile.TarFile, str], None]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address at which this machine serves it."""
    folder = tmp_path / "served"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


@pytest.fixture
def fetch(served: tuple[Path, str], tmp_path: Path, monkeypatch) -> Callable[[Craft], Path]:
    """Return a function that fetches CIFAR-10 from a malicious archive, as if its checksum were correct."""
    from torchvision.datasets import CIFAR10

    def from_archive(craft: Craft) -> Path:
        archive = served[0] / "cifar.tar.gz"
        with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
            craft(tar, INSIDE)
        monkeypatch.setattr(CIFAR10, "url", f"{served[1]}/{archive.name}")
        monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
        root = tmp_path / "data"
        download_cifar(root, "cifar10", FILES)
        return root

    return from_archive


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", **fields: object) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in fields.items():
        setattr(member, field, value)
    tar.addfile(member, io.BytesIO(content))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of regular files in `folder`, and the kind of each other entry."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else b"no file"
        for path in folder.rglob("*")
        if not path.is_dir() or path.is_symlink()
    }


# matrix: 46
def test_paths_outside_and_unexpected_names_are_not_extracted(fetch, tmp_path: Path) -> None:
    def craft(tar: tarfile.TarFile, inside: str) -> None:
        for name in FILES:
            add(tar, f"{inside}/{name}", b"good")
        outside = ("..", "../..", f"{inside}/..", f"{inside}/../..", str(tmp_path / "outside"), "/tmp/../..", ".", "")
        for place in outside:
            for name in (*FILES, "canary"):
                add(tar, f"{place}/{name}", b"evil")
        add(tar, f"{inside}/canary", b"evil")
        add(tar, f"./{inside}/data_batch_1", b"evil")
        add(tar, f"{inside}//data_batch_1", b"evil")

    root = fetch(craft)
    assert contents(root) == {f"{INSIDE}/{name}": b"good" for name in FILES}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "served"]


@contextmanager
def no_file_beyond(num_bytes: int) -> Iterator[None]:
    """Prevent files of this process from growing, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


SPECIAL = {
    "a symbolic link": {"type": tarfile.SYMTYPE, "linkname": "../../secret"},
    "a symbolic link to a folder": {"type": tarfile.SYMTYPE, "linkname": "/"},
    "a hard link": {"type": tarfile.LNKTYPE, "linkname": "../secret"},
    "a hard link inside": {"type": tarfile.LNKTYPE, "linkname": f"{INSIDE}/test_batch"},
    "a character device": {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5},
    "a block device": {"type": tarfile.BLKTYPE, "devmajor": 8, "devminor": 0},
    "a pipe": {"type": tarfile.FIFOTYPE},
    "a folder": {"type": tarfile.DIRTYPE},
}


# matrix: 46
@pytest.mark.parametrize("fields", SPECIAL.values(), ids=SPECIAL)
def test_a_member_that_is_not_a_file_is_refused(fetch, tmp_path: Path, fields: dict[str, object]) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")

    def craft(tar: tarfile.TarFile, inside: str) -> None:
        for name in FILES[1:]:
            add(tar, f"{inside}/{name}", b"good")
        add(tar, f"{inside}/{FILES[0]}", **fields)

    with pytest.raises(DataError, match=r"could not be downloaded: .*data_batch_1") as refused:
        fetch(craft)
    assert len(str(refused.value).splitlines()) == 1
    assert FILES[0] not in {Path(name).name for name in contents(tmp_path / "data")}
    assert secret.read_bytes() == b"secret"
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_symlink() or path.name.startswith(".")]


# matrix: 46
def test_a_link_does_not_redirect_the_next_member(fetch, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")

    def craft(tar: tarfile.TarFile, inside: str) -> None:
        add(tar, inside, type=tarfile.SYMTYPE, linkname=str(tmp_path))
        for name in FILES:
            add(tar, f"{inside}/{name}", type=tarfile.SYMTYPE, linkname=str(secret))
            add(tar, f"{inside}/{name}", b"good")

    root = fetch(craft)
    assert contents(root) == {f"{INSIDE}/{name}": b"good" for name in FILES}
    assert secret.read_bytes() == b"secret"


# matrix: 46
@pytest.mark.parametrize("name", [f"{INSIDE}/{FILES[0]}", f"{INSIDE}/nobody-asked", "elsewhere"])
def test_an_archive_that_unpacks_to_too_many_bytes_is_refused(fetch, tmp_path: Path, monkeypatch, name: str) -> None:
    """Skipping a member decompresses it, so unwanted members count too."""
    assert MAX_UNPACKED_BYTES < 2**30
    monkeypatch.setattr(download, "MAX_UNPACKED_BYTES", 1_000_000)

    def craft(tar: tarfile.TarFile, inside: str) -> None:
        add(tar, name, bytes(1_000_000))
        for expected in FILES:
            add(tar, f"{inside}/{expected}", b"good")

    with pytest.raises(DataError, match="unpacks to more than 1,000,000 bytes"):
        fetch(craft)
    assert contents(tmp_path / "data") == {}


# matrix: 46
def test_a_header_with_too_large_a_size_is_refused(fetch, tmp_path: Path) -> None:
    def craft(tar: tarfile.TarFile, inside: str) -> None:
        member = tarfile.TarInfo(f"{inside}/{FILES[0]}")
        member.size = 2**32
        tar.fileobj.write(member.tobuf(tarfile.USTAR_FORMAT) + bytes(tarfile.RECORDSIZE))

    with pytest.raises(DataError, match="has no CIFAR-10, and it could not be downloaded: "):
        fetch(craft)
    assert contents(tmp_path / "data") == {}


# matrix: 46
def test_an_endless_archive_is_refused(fetch, tmp_path: Path) -> None:
    def craft(tar: tarfile.TarFile, inside: str) -> None:
        for number in range(MAX_MEMBERS):
            add(tar, f"{inside}/{number}")
        for name in FILES:
            add(tar, f"{inside}/{name}", b"good")

    with pytest.raises(DataError, match=f"has more than {MAX_MEMBERS} entries"):
        fetch(craft)
    assert contents(tmp_path / "data") == {}


# matrix: 46
@pytest.mark.parametrize(
    "content",
    [b"", b"<html>", gzip.compress(b"no tar"), gzip.compress(b"x" * 5000)[:-20]],
    ids=["empty", "a page", "no tar in gzip", "gzip that is cut short"],  # the header of gzip contains the time
)
def test_an_invalid_archive_is_refused_in_one_line(served, tmp_path: Path, monkeypatch, content: bytes) -> None:
    from torchvision.datasets import CIFAR10

    (served[0] / "cifar.tar.gz").write_bytes(content)
    monkeypatch.setattr(CIFAR10, "url", f"{served[1]}/cifar.tar.gz")
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(content).hexdigest())
    with pytest.raises(DataError, match="has no CIFAR-10, and it could not be downloaded: ") as refused:
        load_cifar(Cifar10(root=str(tmp_path / "data")), may_download=True)
    assert len(str(refused.value).splitlines()) == 1
    assert contents(tmp_path / "data") == {}


# matrix: 46
def test_a_gzip_file_is_read_only_up_to_the_size_in_its_header(served, tmp_path: Path, monkeypatch) -> None:
    """A header of three images precedes 200 MB of zeros; nothing is decompressed to the disk."""
    from torchvision.datasets import FashionMNIST

    bomb = gzip.compress(struct.pack(">4I", 0x0803, 3, 28, 28) + bytes(200_000_000), compresslevel=1)
    names = [name for name, _ in FashionMNIST.resources]
    for name in names:
        (served[0] / name).write_bytes(bomb)
    monkeypatch.setattr(FashionMNIST, "mirrors", [f"{served[1]}/"])
    monkeypatch.setattr(FashionMNIST, "resources", [(name, hashlib.md5(bomb).hexdigest()) for name in names])
    with no_file_beyond(50_000_000), pytest.raises(DataError, match="its header says 2,352 bytes, and it holds more"):
        load_fashion_mnist(FashionMnist(root=str(tmp_path / "data")), may_download=True)
    fetched = contents(tmp_path / "data")
    assert {Path(name).name for name in fetched} == set(names)
    assert set(fetched.values()) == {bomb}
