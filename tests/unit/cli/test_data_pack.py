"""`paceline data pack`, `unpack` and `verify --against`, as a person uses them one after the other."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.cli.data_inspect import inspect_data
from paceline.cli.data_pack import pack_data, unpack_data
from paceline.cli.data_verify import verify_data
from paceline.cli.options import DataInspectOptions, DataPackOptions, DataUnpackOptions, DataVerifyOptions
from paceline.core.errors import DataError, RecipeError
from paceline.data.native import load_native


@pytest.fixture
def photographs(tmp_path) -> Path:
    """Return a folder of ten JPEGs and two PNGs in two splits of two classes."""
    root = tmp_path / "photos"
    noise = np.random.default_rng(0).integers(0, 256, (12, 24, 32, 3), dtype=np.uint8)
    for number in range(12):
        split, name = ("train", "val")[number % 2], ("cat", "dog")[number // 6]
        (root / split / name).mkdir(parents=True, exist_ok=True)
        form = "png" if number % 6 == 5 else "jpg"
        Image.fromarray(noise[number]).save(root / split / name / f"{number}.{form}")
    return root


def test_a_pack_is_made_proved_and_unpacked(photographs, tmp_path, capsys):
    out = tmp_path / "photos.pack"
    assert pack_data(DataPackOptions(src=str(photographs), out=out, workers="2", as_json=False)) == 0
    printed = capsys.readouterr().out
    assert "12 (6 training, 6 validation)" in printed
    assert f"in a recipe: data.source.name=pack data.source.root={out}\n" in printed

    assert verify_data(DataVerifyOptions(args=[str(out)], workers="2", against=str(photographs), as_json=False)) == 0
    assert capsys.readouterr().out.startswith(
        "12 images: labels, names and order compared; 12 with exactly the same pixels, 0 different (decoded by pillow"
    )

    assert unpack_data(DataUnpackOptions(pack=str(out), out=tmp_path / "again", workers="2", as_json=False)) == 0
    names = {path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*.*")}
    assert names == {path.relative_to(photographs) for path in photographs.rglob("*.*")}
    assert "12, in " in capsys.readouterr().out


def test_json_is_complete(photographs, tmp_path, capsys):
    out = tmp_path / "photos.pack"
    assert pack_data(DataPackOptions(src=str(photographs), out=out, workers="1", as_json=True)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["images"] == 12 and printed["bytes"] == out.stat().st_size
    assert printed["source_bytes"] == sum(path.stat().st_size for path in photographs.rglob("*.*"))
    assert printed["source"]["name"] == "pack" and printed["source"]["root"] == str(out)
    assert printed["kept"]["it is no JPEG"] == 2
    assert unpack_data(DataUnpackOptions(pack=str(out), out=tmp_path / "again", workers="1", as_json=True)) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 12
    assert verify_data(DataVerifyOptions(args=[str(out)], workers="1", against=str(photographs), as_json=True)) == 0
    assert json.loads(capsys.readouterr().out)["exact"] == 12


def test_a_pack_of_another_set_is_no_proof(photographs, tmp_path, capsys):
    out = tmp_path / "photos.pack"
    pack_data(DataPackOptions(src=str(photographs), out=out, workers="1", as_json=True))
    Image.new("RGB", (32, 24)).save(photographs / "train/cat/0.jpg")
    with pytest.raises(DataError, match=r"0\.jpg: has other pixels in the pack \(train\[0\]; pack the source again\)"):
        verify_data(DataVerifyOptions(args=[str(out)], workers="1", against=str(photographs), as_json=False))
    assert "train  " in capsys.readouterr().out


@pytest.mark.skipif(load_native() is None, reason="the native core is not built")
def test_reencoded_images_are_reported(photographs, tmp_path, capsys):
    out = tmp_path / "small.pack"
    pack_data(DataPackOptions(src=str(photographs), out=out, resize=16, quality=80, workers="1", as_json=False))
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "short sides above 16 px scaled to that" in printed and "80: pixels differ from the source" in printed
    assert verify_data(DataVerifyOptions(args=[str(out)], workers="1", against=str(photographs), as_json=False)) == 0
    assert "12 scaled down when packed (mean difference " in capsys.readouterr().out
    assert inspect_data(DataInspectOptions(src=str(out))) == 0
    printed = capsys.readouterr().out
    assert "6 indexed JPEGs" in printed and "above 16 px were scaled down" in printed


def test_shards_go_to_a_folder(photographs, tmp_path):
    out = tmp_path / "shards"
    pack_data(DataPackOptions(src=str(photographs), out=out, shard_size="2MB", workers="1", as_json=True))
    assert (out / "index.pack").is_file()


def test_an_existing_pack_is_overwritten_only_on_request(photographs, tmp_path):
    out = tmp_path / "photos.pack"
    pack_data(DataPackOptions(src=str(photographs), out=out, workers="1", as_json=True))
    with pytest.raises(DataError, match="exists already"):
        pack_data(DataPackOptions(src=str(photographs), out=out, workers="1", as_json=True))
    assert pack_data(DataPackOptions(src=str(photographs), out=out, overwrite=True, workers="1", as_json=True)) == 0


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ({"form": "tar"}, r"^--format: 'tar' is not a format \(write pack or lmdb\)"),
        ({"form": "lmdb", "resize": 256}, r"^--resize: is for packs, and --format is lmdb \(leave it out\)"),
        ({"form": "lmdb", "shard_size": "1GB"}, "^--shard-size: is for packs"),
        ({"form": "lmdb", "overwrite": True}, "^--overwrite: is for packs"),
        ({"quality": 90}, r"^--quality: has no effect without --resize"),
        ({"shard_size": "1MB"}, r"^--shard-size: 1MB is less than 2 MB \(write 1GB\)"),
        ({"shard_size": "big"}, r"^--shard-size: 'big' is not an amount of bytes"),
    ],
)
def test_options_that_contradict_one_another_are_refused_before_anything_is_read(tmp_path, requested, message):
    with pytest.raises(RecipeError, match=message):
        pack_data(DataPackOptions(src="digits", out=tmp_path / "out", **requested))
    assert list(tmp_path.iterdir()) == []


def test_only_packs_are_unpacked(photographs, tmp_path):
    with pytest.raises(RecipeError, match="is not a pack"):
        unpack_data(DataUnpackOptions(pack=str(photographs), out=tmp_path / "out", workers="1", as_json=False))


def test_an_lmdb_is_written(tmp_path, capsys):
    pytest.importorskip("lmdb", reason="lmdb is not installed")
    words = ["data.source.num_images=20", "data.source.num_val_images=5"]
    pack_data(
        DataPackOptions(
            src="synthetic", out=tmp_path / "out.lmdb", overrides=words, form="lmdb", workers="1", as_json=True
        )
    )
    printed = json.loads(capsys.readouterr().out)
    assert printed["images"] == 25 and printed["source"]["name"] == "lmdb" and printed["bytes"] > 0
