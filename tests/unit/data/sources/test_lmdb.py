"""An LMDB survives a round trip in any process, and any file gives samples or a one-line error."""

import json
import os
import pickle
import random
import struct
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets
from paceline.core.errors import DataError
from paceline.data.bad_images import ImageError
from paceline.data.convert import lmdb_writer
from paceline.data.convert.lmdb_writer import write_lmdb
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.decode import decode
from paceline.data.sources.builtin import load_synthetic
from paceline.data.sources.fingerprint import digest_datasets
from paceline.data.sources.folder import load_folder
from paceline.data.sources.lmdb import load_lmdb, open_lmdb
from paceline.data.sources.lmdb_pages import LmdbFormatError, LmdbReader
from paceline.recipe.schema.source import Folder, Lmdb, Synthetic

lmdb = pytest.importorskip("lmdb", reason="an LMDB is written by the package lmdb: pip install lmdb")
PAGE = 4096
INFO = DatasetInfo("made", "train", 0, ("a", "b", "c"), 3, None, (0.5, 0.4, 0.3), (0.1, 0.2, 0.3), ("a note",))


class GivenSamples:
    """A split of given contents."""

    def __init__(self, split, contents, names=None):
        self.info = replace(INFO, split=split, num_images=len(contents))
        self.contents = contents
        self.names = names or [f"{split}/{index}.jpg" for index in range(len(contents))]

    def __len__(self):
        return len(self.contents)

    def read(self, index):
        return self.contents[index], index % 3

    def name_of(self, index):
        return self.names[index]


def made(train, val=(b"v",)):
    return Datasets(GivenSamples("train", list(train)), GivenSamples("val", list(val)))


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a dataset, and returns the folder."""

    def to(datasets, name="set"):
        write_lmdb(datasets, tmp_path / name, lambda done, total: None, skip_bad=True)
        return tmp_path / name

    return to


def load(folder):
    return load_lmdb(Lmdb(root=str(folder)))


def everything(datasets):
    return [[source.read(index) for index in range(len(source))] for source in (datasets.train, datasets.val)]


def noise(number, seed=0, max_bytes=3000):
    draw = random.Random(seed)
    return [draw.randbytes(draw.randrange(1, max_bytes)) for _ in range(number)]


def edit(folder, entries):
    """Change values with LMDB's own library."""
    with lmdb.open(str(folder), lock=False, map_size=2**30) as env, env.begin(write=True) as transaction:
        for key, value in entries.items():
            transaction.put(key, value) if value is not None else transaction.delete(key)


def edit_metadata(folder, change):
    with lmdb.open(str(folder), lock=False, readonly=True) as env, env.begin() as transaction:
        metadata = json.loads(transaction.get(b"__paceline__"))
    change(metadata)
    text = json.dumps(metadata).encode()
    edit(folder, {b"__paceline__": text, b"__paceline__/crc32": b"%08x" % zlib.crc32(text)})


@pytest.mark.parametrize("name", ["folder", "synthetic"])
def test_samples_survive_a_round_trip(name, make_images, write):
    root = make_images({"train/cat": 3, "train/dog": 2, "val/cat": 1, "val/dog": 1})
    pixels = Synthetic(num_images=50, num_val_images=7, image_size=9, channels=1)
    source = load_folder(Folder(root=str(root))) if name == "folder" else load_synthetic(pixels)
    read = load(write(source))
    assert digest_datasets(read) == digest_datasets(source)
    for theirs, ours in ((source.train, read.train), (source.val, read.val)):
        assert ours.info == theirs.info
        assert np.array_equal(ours.labels, theirs.labels)
        for index in range(len(theirs)):
            (found, label), (expected, expected_label) = ours.read(index), theirs.read(index)
            assert label == expected_label and type(label) is int
            assert np.array_equal(found, expected) if name == "synthetic" else found == expected
            assert theirs.name_of(index).endswith(ours.name_of(index))
    assert isinstance(read.train, ArraySource) == (name == "synthetic")


def test_a_sample_is_named_by_its_path_below_the_root(make_images, write):
    root = make_images({"train/cat": 2, "val/cat": 1})
    read = load(write(load_folder(Folder(root=str(root)))))
    assert [read.train.name_of(index) for index in range(2)] == ["cat/0.png", "cat/1.png"]


def test_a_tree_of_three_levels_is_searched_as_the_library_does(write):
    contents = noise(2500)
    folder = write(made(contents, noise(700, seed=1)))
    assert LmdbReader(folder / "data.mdb")._pages.meta.depth >= 3
    read = everything(load(folder))
    assert [content for content, _ in read[0]] == contents
    with lmdb.open(str(folder), lock=False, readonly=True) as env, env.begin() as transaction:
        for index, (content, label) in enumerate(read[0]):
            value = transaction.get(b"train/%010d" % index)
            assert struct.unpack_from("<i", value) == (label,) and value[4:].startswith(content)


def test_a_value_without_its_label_is_a_readable_image(make_images, write):
    folder = write(load_folder(Folder(root=str(make_images({"train/cat": 1, "val/cat": 1})))))
    with lmdb.open(str(folder), lock=False, readonly=True) as env, env.begin() as transaction:
        assert decode(transaction.get(b"train/0000000000")[4:], channels=3, name="x").size == (4, 4)


def test_pixels_of_many_sizes_are_stored_losslessly(write):
    pixels = [np.full((4 + index, 5, 3), index, dtype=np.uint8) for index in range(3)]
    read = load(write(made(pixels))).train
    for index, expected in enumerate(pixels):
        content, _ = read.read(index)
        assert np.array_equal(np.asarray(decode(content, channels=3, name="x")), expected)


def test_threads_forked_processes_and_pickles_read_the_same(write):
    source = load(write(made(noise(300)))).train
    expected = [source.read(index) for index in range(300)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(source.read, range(300))) == expected
    with get_context("fork").Pool(2) as pool:
        assert pool.map(source.read, range(300)) == expected
    copy = pickle.loads(pickle.dumps(source))
    assert [copy.read(index) for index in range(300)] == expected
    assert len(pickle.dumps(source)) < 4 * 300 + 2000


def test_opening_64_times_leaks_no_descriptor(write):
    folder = write(made(noise(50)))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(64):
        everything(load(folder))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_memory_map_grows(write, monkeypatch):
    monkeypatch.setattr(lmdb_writer, "_INITIAL_MAP_BYTES", 2**15)
    monkeypatch.setattr(lmdb_writer, "_BATCH_BYTES", 2**14)
    contents = noise(200)
    assert [content for content, _ in everything(load(write(made(contents))))[0]] == contents


def test_progress_reaches_the_total(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_writer, "_BATCH_BYTES", 2**14)
    calls = []
    write_lmdb(made(noise(60)), tmp_path / "x", lambda done, total: calls.append((done, total)), skip_bad=True)
    assert len(calls) > 2 and calls == sorted(calls) and calls[-1] == (61, 61)


def test_names_of_any_kind_and_length_survive(write):
    names = ["ü猫.jpg", "", "x" * 70_000, "a b"]
    source = Datasets(GivenSamples("train", [b"1"] * 4, names), GivenSamples("val", [b"2"]))
    folder = write(source)
    read = load(folder).train
    assert read.name_of(0) == "ü猫.jpg" and read.name_of(3) == "a b"
    assert read.name_of(1) == f"{folder}/data.mdb[train/0000000001]"
    assert read.name_of(2) == "x" * 65_535


def test_an_existing_folder_is_not_overwritten(write, error_message, tmp_path):
    folder = write(made([b"1"]))
    message = error_message(write_lmdb, made([b"2"]), folder, print)
    assert message == f"{folder}: exists already (remove it, or write to another folder)"
    assert load(folder).train.read(0) == (b"1", 0)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"class_names": ("a", "", "c")}, "class_names.1: "),
        ({"mean": ()}, "mean and std are not one for each channel"),
        ({"std": (0.1, 0.0, 0.1)}, "std.1: "),
        ({"name": ""}, "name: "),
    ],
)
def test_a_dataset_that_cannot_be_described_is_refused_before_an_image_is_read(
    tmp_path, error_message, change, problem
):
    datasets, progress = made([b"1"]), []
    datasets.train.info = replace(datasets.train.info, **change)
    message = error_message(write_lmdb, datasets, tmp_path / "out", lambda *done: progress.append(done))
    assert message.startswith(f"{tmp_path}/out: ") and problem in message and message.endswith(" in the dataset)")
    assert not progress and not list(tmp_path.iterdir())


def test_an_unreadable_image_leaves_no_files(make_images, tmp_path, error_message):
    root = make_images({"train/cat": 2, "val/cat": 1})
    source = load_folder(Folder(root=str(root)))
    (root / "train/cat/1.png").unlink()
    message = error_message(write_lmdb, source, tmp_path / "out", lambda *_: None)
    assert message.startswith("1 image cannot be read: cat/1.png (cannot be read: No such file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train", "val"]


def test_bad_images_are_named_and_can_be_stored_unchanged(make_images, write, tmp_path, error_message):
    root = make_images({"train/cat": 3, "val/cat": 1})
    (root / "train/cat/0.png").write_bytes(b"no image")
    (root / "train/cat/2.png").write_bytes(b"")
    (root / "val/cat/0.png").write_bytes(b"\xff\xd8neither")
    source = load_folder(Folder(root=str(root)), skip_bad=True)
    message = error_message(write_lmdb, source, tmp_path / "out", lambda *_: None)
    assert message == error_message(write_pack, source, tmp_path / "p", PackOptions(), lambda *_: None, 1)
    assert message.startswith("3 images cannot be read: cat/0.png (") and message.endswith("set data.on_bad_image=skip")
    assert not (tmp_path / "out").exists()
    kept = load(write(source))
    assert kept.train.read(0) == (b"no image", 0) and kept.train.read(1) == source.train.read(1)
    assert kept.train.read(2) == (b"", 0) and kept.val.read(0) == (b"\xff\xd8neither", 0)


def test_the_bytes_are_the_same_for_any_number_of_threads(tmp_path, make_images):
    source = load_folder(Folder(root=str(make_images({"train/cat": 20, "train/dog": 9, "val/cat": 11, "val/dog": 1}))))
    for workers in (1, 3):
        write_lmdb(source, tmp_path / f"w{workers}", lambda *_: None, workers=workers)
    assert (tmp_path / "w1/data.mdb").read_bytes() == (tmp_path / "w3/data.mdb").read_bytes()


def test_writing_needs_the_library_and_reading_does_not(write, error_message, tmp_path, monkeypatch):
    folder = write(made([b"1"]))
    monkeypatch.setitem(sys.modules, "lmdb", None)
    assert "pip install 'paceline[lmdb]'" in error_message(write_lmdb, made([b"1"]), tmp_path / "x", print)
    assert load(folder).train.read(0) == (b"1", 0)


def test_a_folder_without_an_lmdb_is_named(tmp_path, error_message):
    message = error_message(load, tmp_path)
    assert message.startswith(f"data.source.root: {tmp_path} has no data.mdb (set it to the folder that")


# matrix: 38
def test_a_truncated_file_is_refused_on_opening(write, error_message):
    folder = write(made(noise(40)))
    file = folder / "data.mdb"
    whole = file.read_bytes()
    for length in (len(whole) - 1, len(whole) - PAGE, len(whole) // 2, 2 * PAGE, 2 * PAGE - 1, PAGE, 100, 1, 0):
        file.write_bytes(whole[:length])
        message = error_message(load, folder)
        assert message.startswith(f"{file}: is truncated: ") and "paceline data pack" in message
    file.write_bytes(whole[:-PAGE])
    assert f"has {len(whole) - PAGE:,} of {len(whole):,} bytes" in error_message(load, folder)


# matrix: 38
def test_a_file_truncated_during_reading_is_a_one_line_error(write, error_message):
    folder = write(made(noise(40)))
    source = load(folder).train
    source.read(0)
    os.truncate(folder / "data.mdb", 2 * PAGE)
    assert "train/0000000039" in error_message(source.read, 39)
    assert source.name_of(39) == f"{folder}/data.mdb[train/0000000039]"
    again = pickle.loads(pickle.dumps(source))
    assert f"has {2 * PAGE:,} bytes, and had " in error_message(again.read, 39)


FIELDS = {
    "magic": (16, b"\0\0\0\0", "is not an LMDB of a 64-bit little-endian machine"),
    "a version": (20, b"\2\0\0\0", "is of version 2 of LMDB's format, and 1 can be read"),
    "a size of pages": (40, b"\1\0\0\0", "has pages of 1 bytes"),
    "an option": (92, b"\4\0", "its meta pages are not those of"),
    "a depth": (94, b"\x40\0", "its meta pages are not those of"),
    "a root": (128, b"\xff" * 8, "refers to page "),
    "a root beyond": (128, b"\xf0\xff\0\0\0\0\0\0", "refers to page 65520 of "),
    "a last page": (136, b"\xff\xff\xff\xff\0\0\0\0", "is truncated: "),
    "a smaller last page": (136, b"\3\0\0\0\0\0\0\0", ""),
    "no levels": (94, b"\0\0", "holds nothing"),
    "fewer levels": (94, b"\1\0", "on a wrong level of the tree"),
    "a count": (120, b"\1\0\0\0\0\0\0\0", "has 1 entries, and "),
}


# matrix: 38
@pytest.mark.parametrize(("place", "value", "problem"), FIELDS.values(), ids=FIELDS)
def test_inconsistent_meta_pages_are_refused(place, value, problem, write, error_message):
    folder = write(made(noise(400)))
    file = folder / "data.mdb"
    content = bytearray(file.read_bytes())
    for page in (0, 1):
        content[page * PAGE + place : page * PAGE + place + len(value)] = value
    file.write_bytes(content)
    message = error_message(load, folder)
    assert message.startswith(f"{file}: ") and problem in message


# matrix: 38
def test_a_flipped_bit_in_a_sample_is_always_found(write):
    folder = write(made(noise(20, max_bytes=20_000)))
    file = folder / "data.mdb"
    source = load(folder).train
    spans = [source.reader.locate(b"train/%010d" % index) for index in range(20)]
    draw = random.Random(0)
    with file.open("r+b", buffering=0) as content:
        for trial in range(400):
            index = trial % 20
            start, length = spans[index]
            place = start + draw.randrange(length)
            old = os.pread(content.fileno(), 1, place)
            os.pwrite(content.fileno(), bytes([old[0] ^ 1 << draw.randrange(8)]), place)
            with pytest.raises(ImageError, match=f"train.{index:010d}.: is damaged: "):
                load(folder).train.read(index)
            os.pwrite(content.fileno(), old, place)
    assert len(everything(load(folder))[0]) == 20


# matrix: 38
def test_a_page_of_garbage_is_a_one_line_error(write):
    folder = write(made(noise(100)))
    file = folder / "data.mdb"
    whole = file.read_bytes()
    expected = everything(load(folder))
    draw = random.Random(0)
    found = 0
    for page in range(len(whole) // PAGE):
        file.write_bytes(whole[: page * PAGE] + draw.randbytes(PAGE) + whole[(page + 1) * PAGE :])
        found += outcome(folder, expected) != "same"
    assert found > 0.9 * len(whole) / PAGE  # but for pages that the library has freed


def outcome(folder, expected):
    """Return how opening a changed LMDB ends: the same samples, or a one-line error."""
    try:
        datasets = load(folder)
        for source in (datasets.train, datasets.val):
            assert "\n" not in source.name_of(len(source) // 2)
        found = everything(datasets)
    except DataError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return "refused"
    assert found == expected
    return "same"


# matrix: 38
def test_two_thousand_changed_files_give_the_same_samples_or_one_line(write, overwrite):
    """Changes pages of the tree and metadata, which contain numbers that are used; samples have a checksum."""
    folder = write(made(noise(24, max_bytes=900), noise(2, seed=1, max_bytes=9000)))
    file = folder / "data.mdb"
    whole = file.read_bytes()
    expected = everything(load(folder))
    draw = random.Random(1)
    trials = {"same": 0, "refused": 0}
    for _ in range(2000):
        content = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 8))):
            page = draw.choice((0, 1, *range(len(whole) // PAGE)))
            place = page * PAGE + int(2 ** draw.uniform(0, 12)) % PAGE
            value = draw.choice((draw.randbytes(1), draw.randbytes(8), b"\xff" * 8, b"\0" * 4, b"\xff\x7f"))
            content[place : place + len(value)] = value
        if draw.random() < 0.1:
            del content[draw.randrange(len(content)) :]
        overwrite(file, content)
        trials[outcome(folder, expected)] += 1
    assert trials["refused"] > 500 and trials["same"] > 50


def test_cycles_of_pages_are_an_error(write):
    folder = write(made(noise(2500)))
    file = folder / "data.mdb"
    meta = LmdbReader(file)._pages.meta
    content = bytearray(file.read_bytes())
    root = meta.root * PAGE
    (lower,) = struct.unpack_from("<H", content, root + 12)
    for pointer in struct.unpack_from(f"<{(lower - 16) // 2}H", content, root + 16):
        struct.pack_into("<HH", content, root + pointer, meta.root & 0xFFFF, meta.root >> 16)
    file.write_bytes(content)
    with pytest.raises(LmdbFormatError, match="on a wrong level"):
        LmdbReader(file).locate(b"train/0000000001")


INVALID_METADATA = {
    "another version": (lambda metadata: metadata.update(version=2), "version: "),
    "a code": (lambda metadata: metadata.update(code="x"), "code: "),
    "no classes": (lambda metadata: metadata.update(class_names=[]), "class_names: "),
    "two channels": (lambda metadata: metadata.update(channels=2), "channels: "),
    "one mean": (lambda metadata: metadata["val"].update(mean=[0.5]), "mean and std are not one for each channel"),
    "an infinite mean": (lambda metadata: metadata["val"].update(mean=[0.5, 0.5, 1e999]), "val.mean.2: "),
    "no spread": (lambda metadata: metadata["train"].update(std=[0.5, 0.5, 0]), "train.std.2: "),
    "pixels of no size": (lambda metadata: metadata["train"].update(kind="pixels"), "pixels have no image_size"),
    "pixels of immense size": (
        lambda metadata: metadata["train"].update(kind="pixels", image_size=[65535, 65535]),
        " bytes, and 30 images of ",
    ),
    "no images of immense size": (
        lambda metadata: metadata["train"].update(kind="pixels", image_size=[10**12, 10**12], num_images=0),
        "train.image_size.0: ",
    ),
    "a kind": (lambda metadata: metadata["train"].update(kind="pickle"), "train.kind: "),
    "more images": (lambda metadata: metadata["train"].update(num_images=31), "has 35 entries, and 36 were written"),
    "fewer classes": (lambda metadata: metadata.update(class_names=["a"]), "has labels from 0 to 2 for 1 classes"),
    "a line in a name": (lambda metadata: metadata.update(class_names=["a\nb", "b", "c"]), None),
}


@pytest.mark.parametrize(("change", "problem"), INVALID_METADATA.values(), ids=INVALID_METADATA)
def test_inconsistent_metadata_are_refused(change, problem, write, error_message):
    folder = write(made(noise(30)))
    edit_metadata(folder, change)
    if problem is None:
        assert load(folder).train.info.class_names[0] == "a\\nb"
        return
    message = error_message(load, folder)
    assert message.startswith(f"{folder}/data.mdb: ") and problem in message


WRONG_ENTRIES = {
    "no metadata": ({b"__paceline__": None}, "has no __paceline__"),
    "other metadata": ({b"__paceline__": b"{}"}, "its metadata do not have the checksum"),
    "no JSON": ({b"__paceline__": b"[" * 9999, b"__paceline__/crc32": b"%08x" % zlib.crc32(b"[" * 9999)}, "metadata "),
    "no labels": ({b"labels/val": None, b"labels/x": b""}, "has no labels/val"),
    "fewer labels": ({b"labels/train": bytes(8)}, "has 2 labels for the 30 images of train"),
    "other labels": ({b"labels/train": bytes(120)}, "the labels of train do not have the checksum"),
    "a sample less": ({b"train/0000000007": None}, "has 34 entries, and 35 were written"),
}


# matrix: 39
@pytest.mark.parametrize(("entries", "problem"), WRONG_ENTRIES.values(), ids=WRONG_ENTRIES)
def test_inconsistent_entries_are_refused(entries, problem, write, error_message):
    folder = write(made(noise(30)))
    edit(folder, entries)
    message = error_message(load, folder)
    assert message.startswith(f"{folder}/data.mdb: ") and problem in message


# matrix: 39
def test_a_sample_with_anothers_label_is_refused(write, error_message):
    folder = write(made(noise(30)))
    with lmdb.open(str(folder), lock=False, readonly=True) as env, env.begin() as transaction:
        other = transaction.get(b"train/0000000001")
    edit(folder, {b"train/0000000000": other})
    message = error_message(load(folder).train.read, 0)
    assert "train[0] has the label 1, and 0 in the list of labels" in message


def test_opening_reads_a_few_pages_for_any_number_of_samples(write):
    folder = write(made([b"x"] * 20_000))
    source = open_lmdb(folder / "data.mdb").train
    assert source.reader._read_page.cache_info().currsize < 20
    assert source.labels.nbytes == 4 * 20_000


def test_a_gif_is_stored_unchanged(make_images, write, tmp_path):
    root = make_images({"train/cat": 1, "val/cat": 1}, extension="gif")
    Image.new("P", (3, 3)).save(root / "train/cat/odd.gif")
    source = load_folder(Folder(root=str(root)))
    assert everything(load(write(source))) == everything(source)
