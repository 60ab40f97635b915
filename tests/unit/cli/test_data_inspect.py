"""Output of `paceline data inspect` and `paceline data stage`."""

import json
from pathlib import Path

import pytest
from PIL import Image

from paceline.cli.data_inspect import inspect_data
from paceline.cli.data_pack import stage_data
from paceline.cli.options import DataInspectOptions, DataStageOptions
from paceline.core.errors import DataError, RecipeError


@pytest.fixture
def photographs(tmp_path):
    """Return a folder of nine images: three cats and one dog to train on."""
    root = tmp_path / "photos"
    for place in ("train/cat/a", "train/cat/b", "train/cat/c", "train/dog/a", *(f"val/cat/{n}" for n in range(5))):
        path = root / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 10)).save(path)
    (root / "val/dog").mkdir()
    Image.new("RGB", (40, 50)).save(root / "val/dog/x.jpg")
    (root / "val/cat/broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return root


def test_classes_sizes_and_formats_are_printed(photographs, capsys):
    assert inspect_data(DataInspectOptions(src=str(photographs), as_json=False)) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for fact in ("4 PNG", "5 PNG, 1 JPEG; 1 image cannot be read", "dog: 1, cat: 3 (in training; 1 to 3)"):
        assert fact in printed.replace(" │ │ │ ", " "), fact


@pytest.mark.parametrize(("num_cats", "expected"), [(11, True), (10, False)])
def test_imbalanced_classes_are_printed_with_the_setting_that_weights_them(photographs, capsys, num_cats, expected):
    for number in range(num_cats - 3):
        Image.new("RGB", (20, 10)).save(photographs / f"train/cat/more-{number}.png")
    assert inspect_data(DataInspectOptions(src=str(photographs), as_json=False)) == 0
    assert ("train.class_weights=balanced" in capsys.readouterr().out) == expected


def test_json_has_every_class(photographs, capsys):
    assert inspect_data(DataInspectOptions(src=str(photographs), as_json=True)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["train"]["classes"] == {"cat": 3, "dog": 1}
    assert printed["val"]["short_side"] == {"min": 10, "p10": 10, "p50": 10, "p90": 10, "max": 40}
    assert printed["val"]["bad"] == 1 and printed["val"]["formats"] == {"PNG": 5, "JPEG": 1}
    assert len(printed["digest"]) == 16 and printed["source"]["name"] == "folder"


def test_pixels_in_memory_are_inspected_too(capsys):
    words = ["data.source.num_images=20", "data.source.image_size=8"]
    assert inspect_data(DataInspectOptions(src="synthetic", overrides=words, as_json=True)) == 0
    train = json.loads(capsys.readouterr().out)["train"]
    assert train["formats"] == {"pixels": 20} and train["image_size"] == [8, 8]


def test_a_copy_is_staged_and_removed(photographs, tmp_path, capsys):
    where = tmp_path / "memory"
    assert stage_data(DataStageOptions(args=[str(photographs), str(where)], as_json=True)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["source"]["name"] == "folder"
    copy = next(where.glob("paceline-stage-*/"))
    assert str(copy) == printed["folder"]
    assert len(list(copy.rglob("*.png"))) == 10
    assert stage_data(DataStageOptions(args=[str(where)], remove=True)) == 0
    assert capsys.readouterr().out == f"removed {copy}\n"
    assert not copy.exists()
    stage_data(DataStageOptions(args=[str(where)], remove=True))
    assert capsys.readouterr().out == f"no copies in {where}\n"


def test_staging_prints_how_to_use_the_copy(photographs, tmp_path, capsys):
    where = tmp_path / "memory"
    assert stage_data(DataStageOptions(args=[str(photographs), str(where)])) == 0
    printed = capsys.readouterr().out
    assert "data.stage=" in printed and "or, in a recipe: data.source.name=folder" in printed
    stage_data(DataStageOptions(args=[str(where)], remove=True, as_json=True))
    assert len(json.loads(capsys.readouterr().out)["removed"]) == 1


def test_bad_images_are_staged_if_the_run_skips_them(photographs, tmp_path, capsys):
    (photographs / "train/cat/empty.png").touch()
    words = [str(photographs), str(tmp_path / "memory"), "data.on_bad_image=skip"]
    assert stage_data(DataStageOptions(args=words, as_json=True)) == 0
    copy = Path(json.loads(capsys.readouterr().out)["folder"])
    assert len(list(copy.rglob("*.png"))) == 11
    with pytest.raises(DataError, match=r"cat/empty\.png \(empty\); .*data\.on_bad_image=skip$"):
        stage_data(DataStageOptions(args=words[:2]))


@pytest.mark.parametrize("words", [[], ["digits"], ["digits", "data.image_size=8"]])
def test_staging_needs_source_and_folder(words):
    with pytest.raises(RecipeError, match="needs SRC and WHERE"):
        stage_data(DataStageOptions(args=words))


def test_removing_wants_a_folder_and_nothing_else(tmp_path):
    with pytest.raises(RecipeError, match="--remove: takes only the folder"):
        stage_data(DataStageOptions(args=["digits", str(tmp_path)], remove=True))
