"""`ImageFileSource`: small, cheap to pickle, and names missing files."""

import os
import pickle

import numpy as np

from paceline.core.pixels import PixelFormat
from paceline.data.sources.image_files import ImageFileSource, build_files_info


def packed(root, names, labels=None):
    info = build_files_info("folder", "train", len(names), ("a", "b"), PixelFormat(3))
    labels = np.zeros(len(names), dtype=np.int32) if labels is None else np.array(labels, dtype=np.int32)
    return ImageFileSource.from_paths(info, str(root), [os.fsencode(name) for name in names], labels)


def test_it_reads_the_bytes_and_the_label_of_each_file(tmp_path):
    names = ["x.jpg", "ü/y.png", os.fsdecode(b"\xff.gif")]
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes([number + 1]))
    source = packed(tmp_path, names, [1, 0, 1])
    assert [source.read(index) for index in range(3)] == [(b"\1", 1), (b"\2", 0), (b"\3", 1)]
    assert type(source.read(0)[1]) is int
    assert source.name_of(1) == f"{tmp_path}/ü/y.png"
    assert source.name_of(2) == f"{tmp_path}/\\udcff.gif"


def test_absolute_paths_do_not_start_from_the_root(tmp_path):
    assert packed("/elsewhere", [str(tmp_path / "x.jpg")]).name_of(0) == f"{tmp_path}/x.jpg"


def test_a_hundred_thousand_files_cost_their_paths_and_twenty_bytes_each():
    names = [f"n{index % 1000:08d}/n{index % 1000:08d}_{index}.JPEG" for index in range(100_000)]
    source = packed("/data/train", names, np.arange(100_000) % 1000)
    text = sum(map(len, names))
    assert len(pickle.dumps(source)) < text + 20 * 100_000
    assert len(source.paths.joined) + source.paths.ends.nbytes + source.labels.nbytes <= text + 60 * 100_000
    copy = pickle.loads(pickle.dumps(source))
    assert [copy.name_of(index) for index in (0, 77_777, 99_999)] == [
        f"/data/train/{names[i]}" for i in (0, 77_777, 99_999)
    ]


def test_a_file_that_cannot_be_read_is_named(tmp_path, error_message):
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "folder.jpg").mkdir()
    os.mkfifo(tmp_path / "pipe.jpg")
    source = packed(tmp_path, ["gone.jpg", "empty.jpg", "folder.jpg", "pipe.jpg", "a\nb.jpg"])
    messages = [error_message(source.read, index) for index in range(len(source))]
    assert messages == [
        f"{tmp_path}/gone.jpg: cannot be read: No such file or directory; remove it or restore it",
        f"{tmp_path}/empty.jpg: is empty (0 bytes); remove it or replace it",
        f"{tmp_path}/folder.jpg: cannot be read: Is a directory; remove it or restore it",
        f"{tmp_path}/pipe.jpg: is not a regular file; remove it or replace it",
        f"{tmp_path}/a\\nb.jpg: cannot be read: No such file or directory; remove it or restore it",
    ]


def test_grey_and_colour_have_their_own_mean():
    colour, grey = (build_files_info("folder", "val", 1, ("a",), PixelFormat(channels)) for channels in (3, 1))
    assert (colour.mean, grey.mean) == ((0.485, 0.456, 0.406), (0.449,))
    assert (colour.std, grey.std) == ((0.229, 0.224, 0.225), (0.226,))
    assert colour.image_size is None
