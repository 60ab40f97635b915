"""WebDataset tars: grouping of files, formats of tars, and one-line errors."""

import contextlib
import io
import json
import os
import pickle
import random
import re
import struct
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import DataError
from paceline.data import files
from paceline.data.sources.fingerprint import digest_datasets
from paceline.data.sources.tar import TarReader
from paceline.data.sources.webdataset import load_webdataset
from paceline.recipe.schema.source import WebDataset

# As in webdataset/tariterators.py, for names that have a key: the part up to the first dot of the last part.
KEY = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")


@pytest.fixture
def tar(tmp_path):
    """Return a function that writes `(name, content)` pairs as a tar and returns its path."""

    def write(members, name="train.tar", kind=tarfile.GNU_FORMAT):
        path = tmp_path / name
        with tarfile.open(path, "w", format=kind) as file:
            for member, content in members:
                about = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member)
                about.size = len(content)
                file.addfile(about, io.BytesIO(content))
        return str(path)

    return write


def samples(number, start=0):
    """Return the members of samples; the image is the sample's number, and labels cycle from 0 to 2."""
    for index in range(start, start + number):
        yield f"{index:06}.cls", b"%d" % (index % 3)
        yield f"{index:06}.jpg", b"%d" % index


def load(train, val=None, **options):
    return load_webdataset(WebDataset(train=train, val=val or train, **options))


def read_all(source):
    return [source.read(index) for index in range(len(source))]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_come_in_order_with_their_labels_and_names(kind, tar, tmp_path):
    path = tar(samples(5), kind=kind)
    train = load(path).train
    assert read_all(train) == [(b"%d" % index, index % 3) for index in range(5)]
    assert train.name_of(3) == f"{path}/000003.jpg"
    assert train.info.class_names == ("0", "1", "2") and train.info.num_images == 5


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_members_have_the_offsets_of_pythons_tarfile(kind, tar):
    draw = random.Random(0)
    folder = tarfile.TarInfo("d")
    folder.type = tarfile.DIRTYPE
    link = tarfile.TarInfo("link.jpg")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    names = ["a.jpg", "d/" * 60 + "long.jpg", "d/" * 40 + "é" * 20 + ".jpg"]
    names += [] if kind == tarfile.USTAR_FORMAT else ["x" * 300 + ".jpg", "y" * 200 + "/ü/" + "z" * 200 + ".png"]
    members = [(name, draw.randbytes(draw.choice((0, 1, 511, 512, 513, 5000)))) for name in names * 3]
    path = tar([(folder, b""), (link, b""), *members], kind=kind)
    with tarfile.open(path) as file:
        expected = [(os.fsencode(each.name), each.offset_data, each.size) for each in file if each.isreg()]
    assert [tuple(member) for member in TarReader(path).members()] == expected
    assert len(expected) == len(members)


def test_numbers_above_eight_gigabytes_are_read(tar, tmp_path):
    """A hole of 9 GB takes no disk; GNU tar writes such a size in binary, POSIX as a record."""
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        about = tarfile.TarInfo("hole.bin")
        about.size = 9 << 30
        path = tmp_path / "big.tar"
        with path.open("wb") as file:
            file.write(about.tobuf(kind))
            file.seek(9 << 30, os.SEEK_CUR)
            with tarfile.open(fileobj=file, mode="w", format=kind) as rest:
                for name, content in samples(1):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    rest.addfile(member, io.BytesIO(content))
        assert read_all(load(str(path)).train) == [(b"0", 0)]


NAMES = ["a.jpg", "a.cls", "d/a.cls", "d/a.jpg", "d.e/a.cls", "d.e/a.jpg", "b.cls", "b.jpg", "b.x.jpg", "b.txt"]
NAMES += [
    "c.JPG",
    "c.CLS",
    "./f.png",
    "./f.cls",
    "g.h.i.cls",
    "k.cls",
    "/abs.jpg",
    "/abs.cls",
    "../up.cls",
    "../up.jpg",
]
NAMES += ["README", ".hidden.jpg", "d/.jpg", "m.cls", "m.jpeg"]


def test_files_are_grouped_as_by_webdataset(tar):
    contents = {name: b"1" if name.lower().endswith("cls") else name.encode() for name in NAMES}
    groups: dict[str, dict[str, str]] = {}
    for name in NAMES:
        found = KEY.match(name)
        if found:
            groups.setdefault(found[1], {})[found[2].lower()] = name
    expected = [
        parts[extension].encode()
        for parts in groups.values()
        for extension in parts
        if extension in ("jpg", "jpeg", "png") and "cls" in parts
    ]
    train = load(tar(contents.items())).train
    assert [content for content, _ in read_all(train)] == expected
    assert len(expected) == 9
    assert train.info.notes[0] == "left out 2 samples without an image (.jpg, .png, ...) in the tars"


def test_ranges_and_stars_expand_in_order(tar, tmp_path):
    for number in range(12):
        tar(samples(2, 2 * number), name=f"t-{number:03}.tar")
    by_range = load(str(tmp_path / "t-{000..011}.tar")).train
    assert [content for content, _ in read_all(by_range)] == [b"%d" % number for number in range(24)]
    assert read_all(load(str(tmp_path / "t-*.tar")).train) == read_all(by_range)
    assert len(load(str(tmp_path / "t-00{2..3}*")).train) == 4
    assert len(load(str(tmp_path / "t-0{0..1}{0..1}.tar")).train) == 8


BAD_PATHS = {
    "nowhere.tar": "does not exist",
    "no*.tar": "does not exist",
    "t-{0..2}.tar": "does not exist",
    "t-{2..0}.tar": "{2..0} is not an increasing range of numbers",
    "t-{0..9999999999}.tar": "{0..9999999999} is not an increasing range",
    "t-{0..99999}{0..99}.tar": "expands to more than 1,000,000 tars",
    "t-{0..0}{,}.tar": "does not exist",
}


@pytest.mark.parametrize(("name", "problem"), BAD_PATHS.items(), ids=BAD_PATHS)
def test_a_path_that_matches_no_tar_is_refused(name, problem, tar, tmp_path, error_message):
    tar(samples(1), name="t-0.tar")
    message = error_message(load, str(tmp_path / "t-0.tar"), str(tmp_path / name))
    assert message.startswith("data.source.val: ") and problem in message


def test_a_repeated_tar_is_refused(tar, tmp_path, error_message):
    for number in (1, 2, 11):
        tar(samples(1), name=f"t-{number}.tar")
    ranges = str(tmp_path / "t-*{1..2}.tar")
    assert len(load(ranges).train) == 3
    tar(samples(1), name="t-1-2.tar")
    message = error_message(load, ranges, str(tmp_path / "t*{1..2}*.tar"))
    assert message == f"data.source.val: matches {tmp_path}/t-1-2.tar twice (correct it)"


def test_pattern_characters_in_names_are_literal(tar, tmp_path):
    path = tar(samples(1), name="a[1]?.tar")
    assert len(load(path).train) == 1
    assert len(load(path.replace("1]?", "*")).train) == 1


def test_a_class_list_beyond_the_limit_is_refused(tar, tmp_path, error_message, monkeypatch):
    monkeypatch.setattr("paceline.data.sources.webdataset._MAX_CLASS_LIST_BYTES", 11)
    (tmp_path / "classes.txt").write_text("cat\ndog\nemu\n")
    assert "classes.txt has more than 11 bytes (correct the path)" in error_message(
        load, tar(samples(3)), classes=str(tmp_path / "classes.txt")
    )


def test_classes_are_named_by_a_list(tar, tmp_path):
    (tmp_path / "classes.txt").write_text("cat\nbig dog\r\nemu\nyak\n")
    data = load(tar(samples(6)), classes=str(tmp_path / "classes.txt"))
    assert data.train.info.class_names == data.val.info.class_names == ("cat", "big dog", "emu", "yak")
    assert data.train.info.notes == ("1 of 4 classes have no training image, such as yak",)


BAD_LISTS = {
    "too few": (b"cat\ndog\n", "has the label 2, and there are 2 classes, starting at 0"),
    "a name twice": (b"cat\ndog\ncat\n", "line 3 names 'cat' again, after line 1"),
    "no name": (b"cat\n\nemu\n", "line 2 has no name"),
    "empty": (b"", "line 1 has no name"),
    "latin": (b"caf\xe9\n", "is not UTF-8 (byte 3)"),
    "gone": (None, "cannot be read: No such file or directory"),
}


@pytest.mark.parametrize(("text", "problem"), BAD_LISTS.values(), ids=BAD_LISTS)
def test_an_invalid_class_list_is_refused(text, problem, tar, tmp_path, error_message):
    if text is not None:
        (tmp_path / "classes.txt").write_bytes(text)
    assert problem in error_message(load, tar(samples(3)), classes=str(tmp_path / "classes.txt"))


def test_a_validation_label_that_training_lacks_is_named(tar, error_message):
    train, val = tar(samples(2)), tar(samples(3), name="val.tar")
    assert error_message(load, train, val) == (
        f"{val}: 000002.jpg has the label 2, and there are 2 classes, starting at 0 (correct the label, or set "
        f"data.source.classes to a list of all classes)"
    )


def test_labels_come_from_a_field_of_json_as_numbers_or_names(tar, tmp_path):
    def members(values):
        for number, value in enumerate(values):
            yield f"{number}.jpg", b"x"
            yield f"{number}.json", json.dumps({"text": "é", "class": value}).encode()

    assert load(tar(members([2, "0", 1])), label="json:class").train.labels.tolist() == [2, 0, 1]
    (tmp_path / "classes.txt").write_text("cat\ndog\n7\n")
    named = load(tar(members(["dog", "cat", 1, "7"])), label="json:class", classes=str(tmp_path / "classes.txt"))
    assert named.train.labels.tolist() == [1, 0, 1, 2]


BAD_LABELS = {
    "text": (b"cat", "000000.cls is labeled 'cat', which is not a class number"),
    "nothing": (b"", "is labeled '', which"),
    "a sign": (b"-1", "is labeled '-1', which"),
    "a fraction": (b"1.0", "is labeled '1.0', which"),
    "immense": (b"9" * 5000, "which is not a class number"),
    "other digits": ("٣".encode(), "000000.cls has a .cls that cannot be read as such"),
    "a lot": (b"1" * 2**21, "has 2,097,152 bytes in 000000.cls, which is too much for a label"),
}
BAD_JSON = {
    "no JSON": (b"1", "has no field 'class' in its JSON"),
    "broken": (b"{", "has a .json that cannot be read as such"),
    "deep": (b"[" * 100_000, "has a .json that cannot be read as such"),
    "no field": (b"{}", "has no field 'class' in its JSON"),
    "a list": (b"[1]", "has no field 'class' in its JSON"),
    "a truth": (b'{"class": true}', "is labeled True, which"),
    "a fraction": (b'{"class": 1.5}', "is labeled 1.5, which"),
    "nothing": (b'{"class": null}', "is labeled None, which"),
    "immense": (b'{"class": ' + b"9" * 5000 + b"}", "has a .json that cannot be read as such"),
}


@pytest.mark.parametrize(
    ("extension", "content", "problem"),
    [("cls", *values) for values in BAD_LABELS.values()] + [("json", *values) for values in BAD_JSON.values()],
)
def test_an_invalid_label_is_named(extension, content, problem, tar, error_message):
    path = tar([("000000.jpg", b"x"), (f"000000.{extension}", content)])
    message = error_message(load, path, label="cls" if extension == "cls" else "json:class")
    assert message.startswith(f"{path}: ") and problem in message and len(message) < 400


@pytest.mark.parametrize("label", ["json", "json:", "CLS", "txt", "cls:"])
def test_another_label_format_is_refused(label, tar, error_message):
    message = error_message(load, tar(samples(1)), label=label)
    assert message == f"data.source.label: '{label}' is neither cls nor json:FIELD (set it to one)"


BAD_GROUPS = {
    "no label": ([("a.jpg", b"x"), ("b.cls", b"0")], "has no a.cls beside a.jpg; set data.source.label to what holds"),
    "a label far off": ([("a.jpg", b"x"), ("b.txt", b""), ("a.cls", b"0")], "has no a.cls beside a.jpg"),
    "two images": ([("a.jpg", b"x"), ("a.png", b"x"), ("a.cls", b"0")], "two images for one sample, a.jpg and a.png"),
    "two labels": (
        [("a.jpg", b"x"), ("a.cls", b"0"), ("a.cls", b"0")],
        "two labels for one sample, the second in a.cls",
    ),
    "nothing": ([], "has no samples to use; expected KEY.jpg"),
    "other files": ([("a.txt", b"x")], "has no samples to use; expected KEY.jpg"),
}


# matrix: 40
@pytest.mark.parametrize(("members", "problem"), BAD_GROUPS.values(), ids=BAD_GROUPS)
def test_incomplete_samples_are_refused(members, problem, tar, error_message):
    path = tar(members)
    message = error_message(load, path)
    assert message.startswith(f"{path}: ") and problem in message


def test_an_empty_image_is_named_when_it_is_read(tar, error_message):
    path = tar([("a.cls", b"0"), ("a.jpg", b"")])
    assert error_message(load(path).train.read, 0) == f"{path}/a.jpg: is empty (0 bytes); make its tar again"


def test_threads_processes_and_pickles_read_the_same_with_few_files_open(tar, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MAX_OPEN_FILES", 2)
    for number in range(9):
        tar(samples(20, 20 * number), name=f"t-{number}.tar")
    source = load(str(tmp_path / "t-*.tar")).train
    expected = read_all(source)
    assert len([each for each in Path("/proc/self/fd").iterdir() if "/t-" in str(each.resolve())]) <= 2
    order = random.Random(0).choices(range(len(source)), k=1000)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(source.read, order)) == [expected[index] for index in order]
    with get_context("fork").Pool(2) as pool:
        assert pool.map(source.read, order) == [expected[index] for index in order]
    assert read_all(pickle.loads(pickle.dumps(source))) == expected


def test_a_hundred_thousand_samples_cost_their_names_and_28_bytes_each(tar):
    def members(number):
        for index in range(number):
            yield f"{index:06}.cls", b"0"
            yield f"{index:06}.jpg", b""

    source = load(tar(members(2000))).train
    columns = (source.starts, source.lengths, source.labels, source.names.ends, source.tar_ends)
    assert len(source.names.joined) == 2000 * len("000000.jpg")
    assert sum(column.nbytes for column in columns) == 24 * 2000 + 8


def test_the_same_samples_in_other_tars_are_the_same_data(tar, tmp_path):
    one = load(tar(samples(6)))
    tar(samples(3), name="p-0.tar")
    tar(samples(3, 3), name="p-1.tar")
    two = load(str(tmp_path / "p-*.tar"))
    assert digest_datasets(one) == digest_datasets(two)
    other = load(tar([*samples(5), ("000005.cls", b"1"), ("000005.jpg", b"5")], name="other.tar"))
    assert digest_datasets(other) != digest_datasets(one)


def test_tars_in_both_splits_are_noted(tar):
    assert load(tar(samples(3))).val.info.notes == ("1 tar of validation are training tars too",)


# matrix: 38
def test_a_tar_truncated_anywhere_is_refused(tar, error_message):
    path = Path(tar(samples(20)))
    whole = path.read_bytes()
    end = 20 * 4 * 512
    assert whole[end:] == bytes(len(whole) - end) and whole[end - 512 : end] != bytes(512)
    for length in (*range(0, end + 1, 512), end - 100, 700, 511, end + 511):
        path.write_bytes(whole[:length])
        message = error_message(load, str(path))
        assert message.startswith(f"{path}: is truncated"), (length, message)
    path.write_bytes(whole[: end + 512])
    assert len(load(str(path)).train) == 20


# matrix: 38
def test_a_tar_that_changes_during_reading_is_a_one_line_error(tar, error_message):
    path = tar(samples(20))
    source = load(path).train
    assert source.read(0) == (b"0", 0)
    size = Path(path).stat().st_size
    os.truncate(path, 1000)
    assert error_message(source.read, 19).startswith(f"{path}/000019.jpg: cannot be read: ends before byte ")
    message = error_message(pickle.loads(pickle.dumps(source)).read, 0)
    assert f"has 1,000 bytes, and had {size:,} when it was listed" in message
    Path(path).unlink()
    os.mkfifo(path)
    assert "is not a regular file" in error_message(pickle.loads(pickle.dumps(source)).read, 0)


def header(name=b"a.jpg", size=b"00000000001\0", kind=b"0", more=b""):
    block = bytearray(512)
    block[: len(name)] = name
    block[124:136] = size
    block[156:157] = kind
    block[257:265] = b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + more


def record(text):
    return text + bytes(-len(text) % 512)


def pax(content):
    return header(b"pax", b"%011o\0" % len(content), b"x", record(content))


END = bytes(1024)
HOSTILE = {
    "a size beyond the end": (
        header(size=b"77777777777\0") + END,
        "is truncated in a.jpg, which has 8,589,934,591 bytes",
    ),
    "an immense size": (header(size=b"\x80" + b"\xff" * 11) + END, "is truncated in a.jpg, which has "),
    "a negative size": (header(size=b"\xff" * 12) + END, "has a sparse or endless file at byte 0"),
    "a size that is none": (header(size=b"12345678901\0") + END, "has a sparse or endless file at byte 0"),
    "a signed size": (header(size=b"-0000000001\0") + END, "has a sparse or endless file"),
    "an immense long name": (
        header(size=b"%011o\0" % 2**21, kind=b"L") + END,
        "has a name or comment of 2,097,152 bytes",
    ),
    "a long name cut short": (header(size=b"%011o\0" % 2**12, kind=b"L") + END, "is truncated"),
    "a sparse file": (header(kind=b"S") + END, "has a sparse or endless file"),
    "a sparse file of POSIX": (pax(b"22 GNU.sparse.major=1\n") + header() + END, "has a sparse or endless file"),
    "a record without a length": (pax(b"path=a.jpg\n") + header() + END, "has no extended header at byte 512"),
    "a record of length 0": (pax(b"0 path=a.jpg\n") + header() + END, "has no extended header"),
    "a record that is too long": (pax(b"99 path=a.jpg\n") + header() + END, "has no extended header"),
    "a record of immense length": (pax(b"9" * 600 + b" path=a.jpg\n") + header() + END, "has no extended header"),
    "a size in a record that is none": (pax(b"11 size=-1\n") + header() + END, "has no extended header"),
    "a size in a record beyond": (pax(b"21 size=999999999999\n") + header() + END, "which has 999,999,999,999 bytes"),
    "names and no file": (pax(b"14 path=a.jpg\n") * 50 + END, "has no samples to use"),
    "links": (header(kind=b"2") + header(kind=b"1") + header(kind=b"3") + END, "has no samples to use"),
    "a folder called like an image": (header(b"a.jpg/", kind=b"0", more=bytes(512)) + END, "has no samples to use"),
    "gzip": (b"\x1f\x8b" + bytes(600), "is compressed (gzip), which prevents random access to samples; unpack it"),
    "text": (b"<html>" * 100, "is not a tar; "),
    "garbage within": (header(more=record(b"x")) + b"x" * 1024 + END, "has no header at byte 1,024"),
    "nothing but zeros": (END, "has no samples to use"),
    "nothing": (b"", "is truncated"),
}


# matrix: 46
@pytest.mark.parametrize(("content", "problem"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_tar_is_a_one_line_error(content, problem, tmp_path, error_message):
    path = tmp_path / "evil.tar"
    path.write_bytes(content)
    message = error_message(load, str(path))
    assert message.startswith(f"{path}: ") and problem in message and len(message) < 600


# matrix: 46
def test_a_million_bytes_of_tiny_records_take_the_time_of_reading_them(tmp_path):
    path = tmp_path / "records.tar"
    path.write_bytes(pax(b"5 a=\n" * (2**20 // 5)) + header() + header(b"a.cls", more=record(b"0")) + END)
    started_s = time.process_time()
    with contextlib.suppress(DataError):
        load(str(path))
    assert time.process_time() - started_s < 1.2  # it was 2.8 s


def test_paths_outside_the_tar_are_only_names(tar, tmp_path):
    names = ["../../etc/passwd", "/etc/shadow", "a\nb", "\x1b[2J"]
    members = [(f"{name}.{kind}", b"0") for name in names for kind in ("cls", "jpg")]
    path = tar(members)
    before = sorted(tmp_path.rglob("*"))
    source = load(path).train
    assert read_all(source) == [(b"0", 0)] * 4
    assert source.name_of(0) == f"{path}/../../etc/passwd.jpg"
    assert source.name_of(2) == f"{path}/a\\nb.jpg" and source.name_of(3).isprintable()
    assert sorted(tmp_path.rglob("*")) == before


# matrix: 46
def test_an_image_of_a_terabyte_that_is_a_hole_is_refused(tmp_path, error_message):
    path = tmp_path / "hole.tar"
    size = b"\x80" + struct.pack(">Q", 2**40).rjust(11, b"\0")
    with path.open("wb") as file:
        file.write(header(size=size))
        file.truncate(2**40 + 4096)
    assert "has 1,099,511,627,776 bytes in a.jpg, which is too much for an image" in error_message(load, str(path))


# matrix: 38
def test_two_thousand_changed_tars_give_samples_or_one_line(tar, tmp_path, overwrite):
    wholes = []
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT):
        members = [*samples(3), *([("é" * 80 + ".cls", b"1"), ("é" * 80 + ".jpg", b"x")] if kind else [])]
        wholes.append(Path(tar(members, kind=kind)).read_bytes().rstrip(b"\0") + bytes(1536))
    path, val = tmp_path / "changed.tar", tar(samples(1), name="val.tar")
    draw = random.Random(0)
    ends = {"read": 0, "refused": 0}
    path.touch()
    for _ in range(2000):
        content = bytearray(draw.choice(wholes))
        for _ in range(draw.choice((1, 1, 2, 6))):
            block = draw.randrange(len(content) // 512) * 512
            place = block + draw.choice((0, 124, 148, 156, 257, 345, draw.randrange(512)))
            value = draw.choice((draw.randbytes(1), draw.randbytes(8), b"7" * 11, b"\x80" + b"\xff" * 11, b"\0" * 100))
            content[place : place + len(value)] = value
            if draw.random() < 0.7:  # put the checksum right, as who crafts one would
                content[block + 148 : block + 156] = b" " * 8
                content[block + 148 : block + 156] = b"%06o\0 " % sum(content[block : block + 512])
        if draw.random() < 0.1:
            del content[draw.randrange(len(content)) :]
        overwrite(path, content)
        try:
            source = load(str(path), val).train
            assert all(source.name_of(index).isprintable() for index in range(len(source)))
            read_all(source)
            ends["read"] += 1
        except DataError as error:
            assert len(str(error).splitlines()) == 1 and len(str(error)) < 1000
            ends["refused"] += 1
    assert min(ends.values()) > 200, ends


def test_arrays_have_the_documented_types(tar):
    source = load(tar(samples(3))).train
    types = (source.starts.dtype, source.lengths.dtype, source.labels.dtype, source.names.ends.dtype)
    assert types == (np.uint64, np.uint32, np.int32, np.int64)
