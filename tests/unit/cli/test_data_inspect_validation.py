"""`paceline data inspect --held-out`: what it lists is what a run is validated by, and nothing that it learns from."""

import json

import numpy as np
import pytest
from PIL import Image

from paceline.cli.data_inspect import list_validation
from paceline.cli.options import DataInspectOptions
from paceline.core.errors import DataError, RecipeError
from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.data.sources.image_files import ImageFileSource
from paceline.recipe.load import Patch, load
from paceline.training.process import Invocation
from paceline.training.run import run

SPLIT = ("data.source.val_fraction=0.25", "data.source.split_seed=3")
SMALL = (
    *("data.image_size=12", "data.batch_size=6", "data.augment=[]", "data.workers=0", "model.name=resnet18_cifar"),
    *("model.width=0.125", "train.epochs=1", "parallel.device=cpu", "parallel.threads=1"),
    *("log.tensorboard=off", "measure.telemetry=off", "log.report=off", "log.worst=0"),
)


@pytest.fixture
def photographs(tmp_path):
    """Return a folder of 24 images in two classes, without a validation folder."""
    random = np.random.default_rng(0)
    for number in range(24):
        path = tmp_path / f"photos/{('cat', 'dog')[number % 2]}/deep/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(256, size=(14, 14, 3), dtype=np.uint8)).save(path)
    return tmp_path / "photos"


@pytest.fixture
def listed(capsys):
    """Return a function that gives the lines that are printed of a source."""

    def lines(src, *words):
        assert list_validation(DataInspectOptions(src=str(src), overrides=list(words))) == 0
        return capsys.readouterr().out.splitlines()

    return lines


def test_listed_images_are_those_a_run_validates_on(photographs, listed, tmp_path, monkeypatch, capsys):
    read = {"train": set(), "val": set()}
    whole = ImageFileSource.read_bytes

    def noting(source, index):
        read[source.info.split].add(source.get_listed_path(index))
        return whole(source, index)

    words = (f"data.source.root={photographs}", *SPLIT, *SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(ImageFileSource, "read_bytes", noting)
        run(
            load("folder", Patch.parse(words)).recipe, World.single(), RunDir(tmp_path / "run"), invocation=Invocation()
        )
    found = listed(tmp_path / "run")
    assert len(found) == 6 and set(found) == read["val"]
    everything = {str(path.relative_to(photographs)) for path in photographs.rglob("*.png")}
    assert read["train"] == everything - set(found) and len(read["train"]) == 18
    assert listed(photographs, *SPLIT) == found != listed(photographs)

    kept = tmp_path / "kept"
    (tmp_path / "run" / "checkpoints").rename(kept)
    assert list_validation(DataInspectOptions(src=str(tmp_path / "run"))) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == found, "stdout is the list and nothing else"
    assert err == (
        f"note: {tmp_path / 'run'}: holds no checkpoint to compare with: "
        "files may have been added, removed or changed since training\n"
    )
    kept.rename(tmp_path / "run" / "checkpoints")

    photographs.rename(tmp_path / "moved")
    assert listed(tmp_path / "run", f"data.source.root={tmp_path}/moved") == found
    (tmp_path / "moved" / found[0]).unlink()
    with pytest.raises(DataError, match=r"^data\.source: is not the dataset that .*step-00000003 was trained on"):
        listed(tmp_path / "run", f"data.source.root={tmp_path}/moved")


def test_json_has_names_and_source(photographs, capsys, listed):
    names = listed(photographs)
    assert list_validation(DataInspectOptions(src=str(photographs), as_json=True)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["held_out"] == names and len(names) == 2
    assert printed["source"]["root"] == str(photographs) and len(printed["digest"]) == 16


def test_a_validation_folder_is_listed_too(photographs, tmp_path, listed):
    (tmp_path / "split").mkdir()
    for name in ("train", "val"):
        (tmp_path / "split" / name).symlink_to(photographs)
    assert sorted(listed(tmp_path / "split")) == sorted(
        str(p.relative_to(photographs)) for p in photographs.rglob("*.png")
    )


def test_pixels_in_memory_have_no_names_to_list():
    with pytest.raises(RecipeError, match=r"^--held-out: digits is pixels in memory"):
        list_validation(DataInspectOptions())


def test_looking_into_all_images_is_not_listing_them():
    with pytest.raises(RecipeError, match=r"^--all: inspects images"):
        list_validation(DataInspectOptions(src="digits", inspect_all=True))
