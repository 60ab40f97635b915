"""`paceline data verify` on good and bad datasets, and on one that needs no decoding."""

import json
import re
import shutil
import sys

import pytest
from PIL import Image

from paceline.cli.data_verify import verify_data
from paceline.cli.options import DataVerifyOptions
from paceline.core.errors import DataError, RecipeError, WorldError


@pytest.fixture
def photographs(tmp_path):
    """Return the arguments for a folder of twelve images, and the folder."""
    for green, split in enumerate(("train", "val")):
        for blue, name in enumerate(("cat", "dog")):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (8, 6), (number, green, blue)).save(tmp_path / split / name / f"{number}.png")
    return ["data.source.name=folder", f"data.source.root={tmp_path}"], tmp_path


def test_good_images_are_counted(photographs, capsys):
    words, _ = photographs
    assert verify_data(DataVerifyOptions(args=words, workers="2")) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"12 images, 0 bad \([\d,.]+ images/s, 2 workers\)\n", out)
    assert err == ""


# matrix: 35
def test_bad_images_are_listed_and_end_in_one_error(photographs, capsys):
    words, root = photographs
    (root / "train/dog/1.png").write_bytes((root / "train/dog/1.png").read_bytes()[:40])
    (root / "val/cat/2.png").write_bytes(b"<html></html>")
    (root / "val/cat/0.png").unlink()
    (root / "val/cat/0.png").symlink_to("gone.png")
    with pytest.raises(DataError) as caught:
        verify_data(DataVerifyOptions(args=words, workers="1"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"train  {root}/train/dog/1.png: cannot be decoded: ")
    assert lines[1] == f"val    {root}/val/cat/0.png: cannot be read: No such file or directory"
    assert lines[2].startswith(f"val    {root}/val/cat/2.png: cannot be decoded: it is not a JPEG, ")
    assert lines[3].startswith("12 images, 3 bad (")
    message = str(caught.value)
    assert message.startswith(f"{root}/train/dog/1.png: cannot be decoded: ") and "\n" not in message
    assert message.endswith("(3 bad images of 12; remove or replace them, or train with data.on_bad_image=skip)")
    assert caught.value.exit_code == 2


def test_json_is_the_only_output_on_stdout(photographs, capsys):
    words, root = photographs
    (root / "val/dog/1.png").write_bytes(b"")
    with pytest.raises(DataError):
        verify_data(DataVerifyOptions(args=words, workers="2", as_json=True))
    assert json.loads(capsys.readouterr().out) == {
        "images": 12,
        "bad": [{"split": "val", "index": 4, "path": f"{root}/val/dog/1.png", "reason": "is empty (0 bytes)"}],
        "copies": {"images": 0, "samples": 0, "across_splits": 0, "in_two_classes": 0, "first": []},
    }


def test_duplicates_are_printed_without_an_error(photographs, capsys):
    words, root = photographs
    for first, second in (("train/cat/0", "val/cat/7"), ("train/cat/1", "train/dog/7"), ("val/dog/2", "val/dog/8")):
        shutil.copy(root / f"{first}.png", root / f"{second}.png")
    assert verify_data(DataVerifyOptions(args=words, workers="2")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        f"same   {root}/train/cat/1.png (train) and {root}/train/dog/7.png (train): in two classes",
        f"same   {root}/train/cat/0.png (train) and {root}/val/cat/7.png (val): in both splits",
        f"same   {root}/val/dog/2.png (val) and {root}/val/dog/8.png (val)",
    ]
    assert lines[3].startswith("15 images, 0 bad (")
    assert lines[4:] == ["3 images have duplicates, 6 samples in all: 1 in both splits, 1 in two classes"]
    assert verify_data(DataVerifyOptions(args=words, workers="2", as_json=True)) == 0
    copies = json.loads(capsys.readouterr().out)["copies"]
    assert copies["first"][1] == {
        "images": [
            {"split": "train", "path": f"{root}/train/cat/0.png"},
            {"split": "val", "path": f"{root}/val/cat/7.png"},
        ],
        "in_both_splits": True,
        "in_two_classes": False,
    }
    assert (copies["images"], copies["samples"], copies["across_splits"], copies["in_two_classes"]) == (3, 6, 1, 1)


def test_pixels_in_memory_need_no_decoding(capsys):
    assert verify_data(DataVerifyOptions(args=[], workers="auto")) == 0
    assert capsys.readouterr().out == "1,797 images, 0 bad (held in memory, nothing to decode)\n"
    assert verify_data(DataVerifyOptions(args=[], workers="auto", as_json=True)) == 0
    assert json.loads(capsys.readouterr().out) == {"images": 1797, "bad": [], "copies": None}


def test_a_terminal_shows_a_bar(photographs, capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    words, _ = photographs
    assert verify_data(DataVerifyOptions(args=words, workers="1")) == 0
    out, err = capsys.readouterr()
    assert "images/s" in err and "━" in err
    assert out.count("\n") == 1


@pytest.mark.parametrize("workers", ["0", "-1", "two", "1.5"])
def test_workers_that_are_no_number_are_refused(workers):
    with pytest.raises(WorldError, match=f"^--workers: '{workers}' is not a number of processes"):
        verify_data(DataVerifyOptions(args=[], workers=workers))


def test_a_missing_source_is_refused_first(tmp_path):
    with pytest.raises(RecipeError, match="neither a preset"):
        verify_data(DataVerifyOptions(args=["nothing"], workers="auto"))
    with pytest.raises(DataError, match="does not exist"):
        verify_data(
            DataVerifyOptions(args=["data.source.name=folder", f"data.source.root={tmp_path}/none"], workers="auto")
        )
