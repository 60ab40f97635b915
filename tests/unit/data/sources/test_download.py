"""Only the requested files of an archive are extracted, only into the given folder."""

import gzip
import io
import os
import resource
import tarfile

import pytest

from paceline.data.sources import download
from paceline.data.sources.download import extract_files

WANTED = ("data", "meta")


@pytest.fixture
def pack(tmp_path):
    """Return a function that makes an archive of (name, content, type) and returns its path."""

    def make(*members):
        path = tmp_path / "archive.tar.gz"
        with tarfile.open(path, "w:gz", compresslevel=1) as tar:
            for name, content, kind in members:
                entry = tarfile.TarInfo(name)
                entry.type = kind
                if kind == tarfile.REGTYPE:
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
                else:
                    entry.linkname = content.decode()
                    tar.addfile(entry)
        return path

    return make


def everything_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def unpacked(archive, tmp_path):
    """Run `extract_files`; return the entries of its folder and the contents of the files."""
    into = tmp_path / "top" / "into"
    into.mkdir(parents=True)
    extract_files(archive, "set", WANTED, into)
    assert everything_in(tmp_path / "top") == ["into", *(f"into/{name}" for name in everything_in(into))]
    assert not any(path.is_symlink() for path in into.iterdir())
    return {path.name: path.read_bytes() for path in into.iterdir()}


def test_only_requested_files_are_written(pack, tmp_path):
    archive = pack(
        ("set/data", b"1", tarfile.REGTYPE),
        ("set/readme", b"2", tarfile.REGTYPE),
        ("set/meta", b"3", tarfile.REGTYPE),
        ("other/data", b"4", tarfile.REGTYPE),
        ("data", b"5", tarfile.REGTYPE),
    )
    assert unpacked(archive, tmp_path) == {"data": b"1", "meta": b"3"}


# matrix: 46
@pytest.mark.parametrize(
    "name", ["../data", "set/../data", "../set/data", "/set/data", "set//data", "set/data/../../meta"]
)
def test_a_path_outside_the_folder_is_not_written(name, pack, tmp_path):
    assert unpacked(pack((name, b"evil", tarfile.REGTYPE)), tmp_path) == {}


# matrix: 46
@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]
)
def test_links_devices_and_pipes_are_not_made(kind, pack, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"kept")
    archive = pack(("set/data", os.fsencode(secret), kind), ("set/meta", b"3", tarfile.REGTYPE))
    assert unpacked(archive, tmp_path) == {"meta": b"3"}
    assert secret.read_bytes() == b"kept"


# matrix: 46
def test_a_link_is_not_written_through(pack, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"kept")
    archive = pack(("set/data", os.fsencode(secret), tarfile.SYMTYPE), ("set/data", b"evil", tarfile.REGTYPE))
    assert unpacked(archive, tmp_path) == {"data": b"evil"}
    assert secret.read_bytes() == b"kept"


# matrix: 46
@pytest.mark.parametrize("name", ["set/data", "set/other", "else"])
def test_more_bytes_than_any_data_set_has_are_refused(name, pack, tmp_path, monkeypatch, error_message):
    monkeypatch.setattr(download, "MAX_UNPACKED_BYTES", 2**20)
    archive = pack((name, bytes(2 * 2**20), tarfile.REGTYPE))
    assert archive.stat().st_size < 20_000
    message = error_message(extract_files, archive, "set", WANTED, tmp_path)
    assert message == f"{archive}: unpacks to more than 1,048,576 bytes (remove it)"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 2**20


# matrix: 46
@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.REGTYPE])
def test_a_header_that_claims_a_terabyte_costs_neither_time_nor_memory(kind, tmp_path, monkeypatch, error_message):
    monkeypatch.setattr(download, "MAX_UNPACKED_BYTES", 2**20)
    entry = tarfile.TarInfo("set/data")
    entry.type, entry.size = kind, 2**40
    archive = tmp_path / "archive.tar.gz"
    with gzip.open(archive, "wb", compresslevel=1) as stream:
        stream.write(entry.tobuf(tarfile.GNU_FORMAT))
        for _ in range(64):
            stream.write(bytes(2**20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = error_message(extract_files, archive, "set", WANTED, tmp_path)
    assert message == f"{archive}: unpacks to more than 1,048,576 bytes (remove it)"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


# matrix: 46
def test_a_sparse_file_is_not_extracted(tmp_path):
    """GNU tar stores a file of a gigabyte of nothing in one block; only plain files are written."""
    entry = tarfile.TarInfo("set/data")
    entry.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = b"10000000000\0"  # the real size, octal
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    archive = tmp_path / "archive.tar.gz"
    with gzip.open(archive, "wb") as stream:
        stream.write(bytes(header) + bytes(1024))
    assert unpacked(archive, tmp_path) == {}


# matrix: 46
def test_more_entries_than_any_data_set_has_are_refused(pack, tmp_path, error_message):
    archive = pack(*((f"set/{number}", b"", tarfile.REGTYPE) for number in range(download.MAX_MEMBERS + 1)))
    assert (
        error_message(extract_files, archive, "set", WANTED, tmp_path)
        == f"{archive}: has more than 100 entries (remove it)"
    )
