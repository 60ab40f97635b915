"""Lists of files with labels: CSV, pickled dicts, and the order of classes."""

import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from paceline.data.sources.manifest import load_manifest
from paceline.recipe.schema.source import Manifest


@pytest.fixture
def files(tmp_path):
    """Return a function that makes small files, so that lists can name them."""

    def touch(*names):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(name.encode())

    touch(*(f"{number}.jpg" for number in range(6)))
    return touch


@pytest.fixture
def load(tmp_path, files):
    """Return a function that loads two lists given as CSV text, a dict, or bytes of a pickle."""

    def write(name, content):
        if isinstance(content, str):
            path = tmp_path / f"{name}.csv"
            path.write_text(content, encoding="utf-8")
        else:
            path = tmp_path / f"{name}.pkl"
            path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
        return str(path)

    def run(train, val="path,label\n5.jpg,cat\n", skip_bad=False, **options):
        section = Manifest(train=write("train", train), val=write("val", val), **options)
        return load_manifest(section, skip_bad=skip_bad)

    return run


def names(source):
    return [Path(source.name_of(index)).name for index in range(len(source))]


def test_a_csv_gives_its_files_in_its_order(load):
    data = load("path,label\n2.jpg,dog\n0.jpg,cat\n1.jpg,dog\n")
    assert names(data.train) == ["2.jpg", "0.jpg", "1.jpg"]
    assert data.train.info.class_names == data.val.info.class_names == ("cat", "dog")
    assert [data.train.read(index) for index in range(3)] == [(b"2.jpg", 1), (b"0.jpg", 0), (b"1.jpg", 1)]
    assert data.val.read(0) == (b"5.jpg", 0)


def test_columns_in_any_order_others_ignored_quotes_blank_lines_and_a_byte_order_mark(load, files):
    files("a, b.jpg", 'say "x".jpg')
    text = '\ufeffid,label,path,note\r\n1,"big, cat","a, b.jpg",x\r\n\r\n2,cat,"say ""x"".jpg",\r\n3, cat, 1.jpg\r\n'
    data = load(text)
    assert names(data.train) == ["a, b.jpg", 'say "x".jpg', "1.jpg"]
    assert data.train.info.class_names == ("big, cat", "cat")


def test_a_dict_gives_its_files_sorted_by_path(load):
    table = {"1.jpg": "dog", "0.jpg": "cat", "2.jpg": "dog"}
    one, other = load(table), load(dict(reversed(table.items())))
    assert names(one.train) == names(other.train) == ["0.jpg", "1.jpg", "2.jpg"]
    assert one.train.labels.tolist() == other.train.labels.tolist() == [0, 1, 1]


LABELS = {
    "numbers from 0 keep theirs": (["2", "0", "1", "10"], ("0", "1", "2", "10"), [2, 0, 1, 3]),
    "other numbers sort as numbers": (["20", "3", "-1", "100"], ("-1", "3", "20", "100"), [2, 1, 0, 3]),
    "padded numbers are text": (["01", "2", "10", "2"], ("01", "10", "2"), [0, 2, 1, 2]),
    "text sorts as text": (["b", "B", "10", "9"], ("10", "9", "B", "b"), [3, 2, 0, 1]),
}


@pytest.mark.parametrize(("labels", "classes", "numbers"), LABELS.values(), ids=LABELS)
def test_classes_are_the_sorted_training_labels(labels, classes, numbers, load):
    rows = "".join(f"{index}.jpg,{label}\n" for index, label in enumerate(labels))
    data = load(f"path,label\n{rows}", f"path,label\n5.jpg,{labels[-1]}\n")
    assert data.train.info.class_names == classes
    assert data.train.labels.tolist() == numbers
    assert data.val.labels.tolist() == [numbers[-1]]


def test_numbers_in_a_dict_and_in_a_csv_are_the_same_classes(load):
    data = load({"0.jpg": 7, "1.jpg": 10}, "path,label\n5.jpg,10\n")
    assert data.train.info.class_names == ("7", "10")
    assert data.val.labels.tolist() == [1]


def test_paths_start_from_root_or_are_absolute(load, files, tmp_path):
    files("images/x.jpg", "images/y.jpg")
    data = load(
        f"path,label\nx.jpg,cat\n{tmp_path}/1.jpg,dog\n", "path,label\ny.jpg,cat\n", root=str(tmp_path / "images")
    )
    assert [data.train.read(index)[0] for index in range(2)] == [b"images/x.jpg", b"1.jpg"]


def test_home_is_expanded(load, files, tmp_path, monkeypatch):
    files("home/x.jpg")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home/m.csv").write_text("path,label\nx.jpg,cat\n")
    assert len(load_manifest(Manifest(train="~/m.csv", val="~/m.csv", root="~")).train) == 1


def test_images_in_both_lists_are_noted(load):
    data = load("path,label\n0.jpg,cat\n5.jpg,cat\n", {"./5.jpg": "cat", "4.jpg": "cat"})
    assert data.val.info.notes == ("1 of 2 validation images are training images too",)
    assert data.train.info.notes == ()


BAD_CSV = {
    "no header": ("0.jpg,cat\n", "train.csv:1: its header lacks path or label; make its first line 'path,label'"),
    "empty": ("", "train.csv:1: its header lacks path or label"),
    "no rows": ("path,label\n", "train.csv: lists no images"),
    "no label": ("path,label\n0.jpg\n", "train.csv:2: has no label"),
    "an empty label": ("path,label\n0.jpg,cat\n1.jpg,\n", "train.csv:3: has no label"),
    "an empty path": ("path,label\n,cat\n", "train.csv:2: '' is not a path"),
    "a path twice": ("path,label\n0.jpg,cat\n1.jpg,cat\n0.jpg,dog\n", "train.csv:4: path '0.jpg' is listed twice"),
    "an open quote": ('path,label\n"0.jpg,cat\n1.jpg,cat\n', "train.csv:3: unexpected end of data"),
    "a NUL": ("path,label\n0\0.jpg,cat\n", "train.csv:2: "),
}


@pytest.mark.parametrize(("text", "problem"), BAD_CSV.values(), ids=BAD_CSV)
def test_a_malformed_csv_names_the_line(text, problem, load, error_message, tmp_path):
    assert error_message(load, text).startswith(f"{tmp_path}/{problem}")


def test_a_csv_in_another_encoding_is_named(load, error_message, tmp_path):
    (tmp_path / "x.csv").write_bytes("path,label\n0.jpg,café\n".encode("latin-1"))
    section = Manifest(train=f"{tmp_path}/x.csv", val=f"{tmp_path}/x.csv")
    assert error_message(load_manifest, section) == f"{tmp_path}/x.csv: is not UTF-8 (byte 20); save it as UTF-8"


BAD_DICT = {
    "a list": (["0.jpg"], "holds a list; "),
    "bytes for a path": ({b"0.jpg": 1}, "has a key of type bytes; "),
    "bytes for a label": ({"0.jpg": b"cat"}, "labels 0.jpg with a value of type bytes; "),
    "a truth for a label": ({"0.jpg": True}, "labels 0.jpg with a value of type bool; "),
    "a fraction for a label": ({"0.jpg": 1.0}, "labels 0.jpg with a value of type float; "),
    "an immense label": ({"0.jpg": 10**5000}, "labels 0.jpg with a value of type int; "),
    "no label": ({"0.jpg": ""}, "labels 0.jpg with an empty text; "),
    "a Path": ({Path("0.jpg"): 1}, "refers to pathlib."),
    "a numpy number": ({"0.jpg": np.int64(1)}, "refers to numpy."),
    "a call": (b"cposix\nsystem\n(S'true'\ntR.", "refers to posix.system; "),
    "no pickle": (b"path,label\n", "is not a readable pickle ("),
}


@pytest.mark.parametrize(("table", "problem"), BAD_DICT.values(), ids=BAD_DICT)
def test_any_other_pickle_is_refused(table, problem, load, error_message, tmp_path):
    message = error_message(load, table)
    assert message.startswith(f"{tmp_path}/train.pkl: {problem}")
    assert message.endswith("; a manifest may hold only a dict of str to int or str (write it as CSV)")


def test_a_lone_surrogate_is_not_a_path(load, error_message):
    stream = b"\x80\x02}X\x03\x00\x00\x00\xed\xa0\x80K\x01s."
    assert "'\\ud800' is not a path" in error_message(load, stream)


def test_a_validation_label_that_training_lacks_is_named(load, error_message, tmp_path):
    message = error_message(load, "path,label\n0.jpg,cat\n1.jpg,giraffe\n", "path,label\n5.jpg,girafe\n")
    assert message == (
        f"{tmp_path}/val.csv:2: label 'girafe' is not in the training list {tmp_path}/train.csv "
        f"(did you mean 'giraffe'?); correct it, or add its training images"
    )


def test_a_wrong_root_is_one_early_error(load, error_message, tmp_path):
    rows = "".join(f"{index}.jpg,cat\n" for index in range(150))
    message = error_message(load, f"path,label\n{rows}")
    assert message == (
        f"{tmp_path}/train.csv: lists {tmp_path}/6.jpg, which does not exist (94 of the first 100 do not); "
        f"set data.source.root to the folder that the paths start from"
    )


# matrix: 37
def test_unreadable_files_far_down_the_list_are_found_on_loading(load, files, error_message, tmp_path):
    files(*(f"many/{index}.jpg" for index in range(100)))
    (tmp_path / "many/link.jpg").symlink_to("gone.jpg")
    os.mkfifo(tmp_path / "pipe.jpg")
    names = [f"many/{index}.jpg" for index in range(101)] + ["many/link.jpg", "pipe.jpg", "nowhere/1.jpg"]
    text = "path,label\n" + "".join(f"{name},cat\n" for name in names)
    assert error_message(load, text) == (
        f"{tmp_path}/train.csv: 4 images cannot be read: many/100.jpg (no such file), many/link.jpg (a dangling link), "
        f"nowhere/1.jpg (No such file or directory), pipe.jpg (a pipe or a device); remove or replace them, or set "
        f"data.on_bad_image=skip"
    )


def test_skip_bad_keeps_missing_files_but_refuses_a_wrong_root(load, error_message, tmp_path):
    train = load("path,label\n9.jpg,cat\n0.jpg,cat\n", skip_bad=True).train
    assert error_message(train.read, 0).startswith(f"{tmp_path}/9.jpg: cannot be read: No such file or directory")
    assert train.read(1) == (b"0.jpg", 0)
    message = error_message(load, "path,label\n8.jpg,cat\n9.jpg,cat\n", skip_bad=True)
    assert "8.jpg, which does not exist (2 of the first 2 do not)" in message


@pytest.mark.parametrize("name", ["m.txt", "m", "m.json"])
def test_a_list_with_another_extension_is_refused(name, error_message):
    message = error_message(load_manifest, Manifest(train=f"/x/{name}", val="/x/v.csv"))
    assert message == f"/x/{name}: is not a .csv, .pkl or .pickle file; write the list as CSV"


@pytest.mark.parametrize("name", ["gone.csv", "gone.pkl"])
def test_a_missing_list_is_named(name, tmp_path, error_message):
    message = error_message(load_manifest, Manifest(train=f"{tmp_path}/{name}", val="/x/v.csv"))
    assert message.startswith(f"{tmp_path}/{name}: cannot be read: No such file or directory; ")


def test_names_in_any_script_are_read(load, files):
    files("naïve/猫.jpg", os.fsdecode(b"plain.jpg"))
    data = load("path,label\nnaïve/猫.jpg,猫\nplain.jpg,cat\n")
    assert data.train.read(0) == ("naïve/猫.jpg".encode(), 1)
    assert data.train.name_of(0).endswith("naïve/猫.jpg")


def targets_of(source):
    """Return the target of each sample, in order."""
    return source.info.targets.rows[source.labels].tolist()


def test_an_empty_text_of_a_dict_is_an_image_without_labels(load):
    data = load({"0.jpg": "b;a", "1.jpg": ""}, {"5.jpg": ""}, separator=";")
    assert data.train.info.targets.rows[data.train.labels].tolist() == [[1, 1], [0, 0]]
    assert data.val.info.targets.rows[data.val.labels].tolist() == [[0, 0]]


@pytest.mark.parametrize(("separator", "cells"), [(";", ("b;a", "c; a;a", "")), (" ", ("b a", "c  a", " "))])
def test_a_separator_gives_several_labels(load, separator, cells):
    rows = "".join(f"{index}.jpg,{cell}\n" for index, cell in enumerate(cells))
    data = load(f"path,label\n{rows}", f"path,label\n5.jpg,c{separator}b\n", separator=separator)
    assert data.train.info.class_names == ("a", "b", "c")
    assert targets_of(data.train) == [[1, 1, 0], [1, 0, 1], [0, 0, 0]]
    assert targets_of(data.val) == [[0, 1, 1]]
    assert data.train.info.count_classes(data.train.labels).tolist() == [2, 1, 1]


def test_columns_of_classes_give_shares(load):
    head = "split,cat,path,dog\n"
    columns = ("dog", "cat")
    data = load(f"{head}x,0.25,0.jpg,0.75\nx,1,1.jpg,\n", "path,dog,cat\n5.jpg,0,1\n", class_columns=columns)
    assert data.train.info.class_names == columns
    assert targets_of(data.train) == [[0.75, 0.25], [0, 1]] and targets_of(data.val) == [[0, 1]]
    automatic = load("cat,path,dog\n0.25,0.jpg,0.75\n", "path,dog,cat\n5.jpg,0,1\n", class_columns="auto")
    assert automatic.train.info.class_names == ("cat", "dog") and targets_of(automatic.val) == [[1, 0]]


@pytest.mark.parametrize(
    ("train", "val", "options", "problem"),
    [
        ("path,a,b\n0.jpg,1,2\n", None, {"class_columns": "auto"}, "train.csv:2: '2' in column 'b'"),
        ("path,a,b\n0.jpg,1,yes\n", None, {"class_columns": "auto"}, "train.csv:2: 'yes' in column 'b'"),
        ("path,a,b\n0.jpg,1,nan\n", None, {"class_columns": "auto"}, "train.csv:2: 'nan' in column 'b'"),
        ("path,a,b\n0.jpg,1,1\n", "path,a\n5.jpg,1\n", {"class_columns": "auto"}, "val.csv:1: .*lacks the column 'b'"),
        ("path,a,\n0.jpg,1,1\n", None, {"class_columns": "auto"}, "train.csv:1: .*name each column"),
        ("path,a,a\n0.jpg,1,1\n", None, {"class_columns": "auto"}, "train.csv:1: .*'a' twice; keep one"),
        ("path,a,a\n0.jpg,1,1\n", None, {"class_columns": ["a"]}, "train.csv:1: .*'a' twice; keep one"),
        ("path,a\n0.jpg,1\n", "path,a,b\n5.jpg,0,1\n", {"class_columns": "auto"}, "val.csv:1: .*'b'.*leave it out"),
        ("path,a\n0.jpg,1,1\n", None, {"class_columns": "auto"}, "train.csv:2: has more cells.*quotes"),
        ("path,label\n0.jpg,a,b\n", None, {"separator": ","}, "train.csv:2: has more cells.*quotes"),
        ({"0.jpg": "a"}, None, {"class_columns": "auto"}, "train.pkl: is a pickle.*write it as CSV"),
        ("path,label\n0.jpg,a\n", "path,label\n1.jpg,a\n5.jpg,a;d\n", {"separator": ";"}, "val.csv:3: label 'd'"),
        ("path,label\n0.jpg,\n", None, {"separator": ";"}, "train.csv: has no label in any line"),
        ({"0.jpg": "a"}, None, {"class_columns": ["a"]}, "train.pkl: is a pickle.*write it as CSV"),
    ],
)  # fmt: skip
def test_wrong_targets_are_named_by_their_line(load, error_message, train, val, options, problem):
    given = (train,) if val is None else (train, val)
    assert re.search(problem, error_message(load, *given, **options))
