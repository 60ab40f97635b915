"""A ladder over forms of data, start to finish on made-up photographs: made once, read by the runs, and removed."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.core.rundir import RunDir
from paceline.recipe.load import load

LADDER = """\
# Forms of data.
recipe: quant/resnet18-imagenet
steps: 2
warmup_steps: 1
repeats: 1
rungs:
  - {name: files, cache: cold, set: {data.workers: 0}}
  - {name: LMDB, data: lmdb, cache: cold, set: {data.order: stored}, keep: always, parity: free}
  - {name: packed, data: pack-256, set: {data.order: random}, keep: always, parity: free}
"""
SMALL = ("model.name=resnet18_cifar", "model.width=0.05", "data.image_size=16", "data.batch_size=4")


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    noise = np.random.default_rng(0).integers(0, 256, (16, 40, 48, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        path = root / ("train", "val")[number // 12] / ("cat", "dog")[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return root


def test_a_ladder_makes_each_form_of_data_once_and_leaves_none_of_it(paceline, photographs, tmp_path: Path) -> None:
    pytest.importorskip("lmdb", reason="the package lmdb is not installed: pip install lmdb")
    (tmp_path / "forms.yaml").write_text(LADDER)
    words = ("forms.yaml", *SMALL, "data.source.root=photos", "parallel.threads=1", "parallel.device=cpu")
    options = ("--ranks", "1", "--run-dir", "found", "--json")
    found = paceline("ladder", *words, *options).result
    rungs = {rung["name"]: rung for rung in found["rungs"]}
    assert [(name, rung["status"]) for name, rung in rungs.items()] == [
        ("files", "kept"),
        ("LMDB", "kept"),
        ("packed", "kept"),
    ]
    assert [name for name, rung in rungs.items() if rung["prepare_s"] > 0] == ["LMDB", "packed"]
    read = [load(str(run_of(tmp_path / "found", rung))).recipe.data for rung in rungs.values()]
    assert [data.source.name for data in read] == ["folder", "lmdb", "pack"]
    assert [data.order for data in read] == ["random", "stored", "random"]
    assert not (tmp_path / "found" / "data").exists()
    assert json.loads((tmp_path / "found" / "experiment.json").read_text()) == found


def run_of(folder: Path, rung: dict) -> Path:
    """Return the run directory of the rung itself, not that of the one below, and check that it has ended."""
    runs = [folder / run for run in rung["runs"] if rung["name"].replace(" ", "-") in run]
    assert len(runs) == 1, rung["runs"]
    assert RunDir(runs[0]).read_result().steps == 3
    return runs[0]


def test_a_run_that_reads_images_twice_is_not_called_cold(paceline, photographs, tmp_path: Path) -> None:
    (tmp_path / "forms.yaml").write_text(LADDER)
    words = ("forms.yaml", *SMALL, "data.source.root=photos", "--steps", "9", "--ranks", "1", "--run-dir", "found")
    paceline("ladder", *words).says("10 steps of 4 images", "12 of training", "--steps 2")
