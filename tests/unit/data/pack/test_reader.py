"""Opening a pack reads no samples, and reading a sample verifies it."""

import errno
import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import DataError
from paceline.data.bad_images import ImageError
from paceline.data.pack.format import FileRole, PackHeader, PackMeta, ProcessingMeta, SplitMeta
from paceline.data.pack.index import find_index_file, open_index
from paceline.data.pack.jpeg_record import restore_jpeg
from paceline.data.pack.reader import build_pack_datasets, open_pack
from paceline.data.pack.shards import HEADER_BYTES, LocalShards, build_read_error
from paceline.data.sources.build import load_pack
from paceline.recipe.schema.source import Pack


@pytest.fixture(params=["one file", "shards"])
def made(request, core, photos, packed, monkeypatch, tmp_path):
    """Return a pack of photographs, in one file or in shards, and its path."""
    monkeypatch.setattr("paceline.data.convert.pack_writer._MIN_SHARD_BYTES", 1000)
    return packed(photos, **({"shard_bytes": 2500} if request.param == "shards" else {})), tmp_path / "made.pack"


def test_locate_gives_the_position_of_a_sample_in_memory(made):
    packed, _ = made
    train = packed.train
    shards, offsets, lengths = train.locate(np.arange(7))
    assert (shards.dtype, offsets.dtype, lengths.dtype) == (np.int32, np.uint64, np.uint64)
    for index in range(7):
        start, length = int(offsets[index]), int(lengths[index])
        stored = bytes(train.files.memory(int(shards[index]))[start : start + length])
        assert stored == train.read_stored(index) and len(stored) > 100
        assert train.read(index)[0] == (restore_jpeg(stored) if train.kinds[index] == 1 else stored)
    again = train.locate(np.array([4, 0]))
    assert [part.tolist() for part in again] == [part[[4, 0]].tolist() for part in (shards, offsets, lengths)]


def test_load_pack_opens_it(made):
    packed, path = made
    assert load_pack(Pack(root=str(path))).train.read(2) == packed.train.read(2)


def test_an_unpickled_pack_opens_its_files(made):
    packed, _ = made
    sent = pickle.dumps(packed.val)
    assert len(sent) < 2000
    unpickled = pickle.loads(sent)
    assert unpickled.info == packed.val.info
    assert [unpickled.read(index) for index in range(3)] == [packed.val.read(index) for index in range(3)]


def test_forked_processes_and_threads_read_the_same(made):
    packed, _ = made
    expected = [packed.train.read(index) for index in range(7)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(packed.train.read, list(range(7)) * 5)) == expected * 5
    receiver, sender = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(
        target=lambda: sender.send([packed.train.read(index) for index in range(7)])
    )
    child.start()
    assert receiver.poll(60) and receiver.recv() == expected
    child.join(60)


def test_a_sample_whose_bytes_have_changed_is_named(made, tmp_path):
    packed, path = made
    file = path / "data-00000.pack" if path.is_dir() else path
    content = bytearray(file.read_bytes())
    content[HEADER_BYTES + 50] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        ImageError, match=r"made.pack: cat/a.jpg: is damaged: its checksum does not match; copy the pack"
    ):
        open_pack(path).train.read(0)
    assert open_pack(path).train.read(1) == packed.train.read(1)


def test_a_truncated_file_is_refused_on_opening(made):
    _, path = made
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        content = file.read_bytes()
        for changed in (content[:-1], content[:100], b"", content + b"x"):
            file.write_bytes(changed)
            with pytest.raises(DataError, match=file.name.replace("index", "made")):
                open_pack(path)
        file.write_bytes(content)
    open_pack(path)


def test_a_shard_truncated_during_reading_is_an_error(core, photos, packed, tmp_path):
    found = packed(photos, shard_bytes=1 << 20)
    found.train.read(0)
    os.truncate(tmp_path / "made.pack" / "data-00000.pack", 200)
    with pytest.raises(DataError, match=r"ends before byte .* \(it was truncated; restore it\)"):
        found.train.read(0)


def test_shards_of_another_pack_are_refused(core, photos, packed, monkeypatch, tmp_path):
    monkeypatch.setattr("paceline.data.convert.pack_writer._MIN_SHARD_BYTES", 1000)
    for name, every in (("a", 8), ("b", 7)):
        packed(photos, name, shard_bytes=2500, every=every)
    (tmp_path / "a" / "data-00001.pack").write_bytes((tmp_path / "b" / "data-00001.pack").read_bytes())
    with pytest.raises(DataError, match=r"data-00001.pack: (its header|has .* bytes, not)"):
        open_pack(tmp_path / "a")


def test_every_file_has_the_id_of_its_pack(core, photos, packed, monkeypatch, tmp_path):
    monkeypatch.setattr("paceline.data.convert.pack_writer._MIN_SHARD_BYTES", 1000)
    packed(photos, shard_bytes=2500)
    headers = [PackHeader.from_bytes(path.read_bytes(), "x") for path in sorted((tmp_path / "made.pack").iterdir())]
    assert len({header.pack_id for header in headers}) == 1 and any(headers[0].pack_id)
    assert [header.role for header in headers] == [FileRole.SHARD] * (len(headers) - 1) + [FileRole.INDEX]
    assert [header.shard for header in headers[:-1]] == list(range(len(headers) - 1))
    assert {header.num_shards for header in headers} == {len(headers) - 1}


def test_opening_and_closing_leaks_no_descriptor(made, pixels, packed):
    _, path = made
    packed(pixels, "pixels.pack")
    before = set(Path("/proc/self/fd").iterdir())
    for _ in range(64):
        found = open_pack(path)
        found.train.read(0)
        assert found.train.files.memory(0) is not None
        open_pack(path.with_name("pixels.pack")).train.read(0)
    found.train.files.close()
    found.train.read(0)  # opens it again
    del found
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_mapped_pixels_are_writable_without_changing_the_file(core, pixels, packed, tmp_path):
    path = tmp_path / "made.pack"
    images = packed(pixels).train.images
    content = path.read_bytes()
    assert images.flags.writeable and not images.flags.owndata
    images += 1
    assert path.read_bytes() == content


def test_pixels_in_more_than_one_shard_are_read_one_by_one(core, pixels, packed, monkeypatch):
    monkeypatch.setattr("paceline.data.convert.pack_writer._MIN_SHARD_BYTES", 1)
    found = packed(pixels, shard_bytes=160)
    assert len(found.train.files) > 2
    assert [found.train.read(index)[0].tolist() for index in range(5)] == pixels.train.images.tolist()
    assert found.train.name_of(3) == "digits/train[3]"


@pytest.mark.parametrize("name", ["no.pack", "file.txt/x.pack"])
def test_opening_anything_else_is_a_one_line_error(tmp_path, name):
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(DataError, match=r"(does not exist|is not a pack).* \(.*\)$") as caught:
        open_pack(tmp_path / name)
    assert len(str(caught.value).splitlines()) == 1


def test_a_shard_is_not_a_pack(core, pixels, packed, tmp_path):
    packed(pixels, shard_bytes=1 << 20)
    with pytest.raises(DataError, match=r"is a shard of a pack \(name the folder that it lies in\)"):
        open_pack(tmp_path / "made.pack" / "data-00000.pack")


def test_a_pipe_in_place_of_a_pack_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "p")
    with pytest.raises(DataError, match=r"p: cannot be read: Illegal seek"):
        open_pack(tmp_path / "p")


def test_an_index_opens_without_data(core, photos, packed, tmp_path):
    """The cache of a remote pack holds only the header and the index of a one-file pack."""
    packed(photos)
    header = PackHeader.from_bytes((tmp_path / "made.pack").read_bytes(), "x")
    with (tmp_path / "made.pack").open("rb") as whole, (tmp_path / "hole").open("wb") as hole:
        hole.write(whole.read(HEADER_BYTES))
        whole.seek(header.index_offset)
        hole.seek(header.index_offset)
        hole.write(whole.read())
    index = open_index(tmp_path / "hole", "s3://there/made.pack")
    name, num_bytes = "made.pack", index.files[0].num_bytes
    shards = LocalShards.open_checked(tmp_path, [type(index.files[0])(name, num_bytes, index.files[0].header_crc32)])
    assert build_pack_datasets(index, shards).train.read(0) == open_pack(tmp_path / "made.pack").train.read(0)
    assert find_index_file(tmp_path / "made.pack") == tmp_path / "made.pack"


def test_metadata_of_three_channels_survive_a_round_trip(tmp_path):
    split = SplitMeta(name="x", mean=(0.1, 1 / 3, 0.2), std=(1.0, 2.0, 3.0), notes=("a", "b"), digest="0" * 64)
    meta = PackMeta(class_names=("a",), channels=3, made=ProcessingMeta(every=8), train=split, val=split)
    assert PackMeta.from_json(meta.to_json(), "x") == meta


def test_too_many_open_shards_are_reported(tmp_path):
    error = build_read_error(tmp_path / "data-01023.pack", OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert "Too many open files (raise the number of open files with ulimit -n, or pack it again" in str(error)


def test_a_folder_without_an_index_is_refused(tmp_path):
    with pytest.raises(DataError, match=r": is a folder without index\.pack, not a pack \(name a pack\)$"):
        open_pack(tmp_path)
