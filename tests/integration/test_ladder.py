"""A ladder of real runs over forms of data: what it makes and leaves, and that it goes on where it was stopped."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.run_dir import RunDir
from paceline.recipe.load import load

LADDER = """\
# Forms of data.
recipe: quant/resnet18-imagenet
steps: 2
warmup_steps: 1
repeats: 1
rungs:
  - {name: files, cache: cold, set: {data.workers: 0, log.every: 1st, log.tensorboard: "off"}}
  - {name: packed, data: pack, keep: always}
  - {name: LMDB, data: lmdb, set: {optim.implementation: loop}, expects: [optimizer]}
"""
SMALL = ("model.name=resnet18_cifar", "model.width=0.05", "data.image_size=16", "data.batch_size=4")
EXACT = ("train.precision=fp32", "parallel.threads=1", "parallel.device=cpu")
WORDS = ("forms.yaml", *SMALL, *EXACT, "data.source.root=photos", "--ranks", "1", "--run-dir", "found")


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Write twelve photographs of training and four of validation, and the ladder beside them."""
    (tmp_path / "forms.yaml").write_text(LADDER)
    root = tmp_path / "photos"
    noise = np.random.default_rng(0).integers(0, 256, (16, 40, 48, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        path = root / ("train", "val")[number // 12] / ("cat", "dog")[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return root


def test_a_ladder_makes_each_form_of_data_once_leaves_none_and_repeats_no_run(paceline, photographs, tmp_path) -> None:
    """A single pair proves no gain, so that what is not kept always is dropped."""
    pytest.importorskip("lmdb", reason="the package lmdb is not installed: pip install lmdb")
    ended = paceline("ladder", *WORDS, "--json")
    found, folder = ended.result, ExperimentDir(tmp_path / "found")
    files, packed, lmdb = found["rungs"]
    assert [(rung["status"], rung["below"]) for rung in found["rungs"]] == [
        ("kept", ""),
        ("kept", "files"),
        ("dropped", "packed"),
    ]
    assert packed["parity"]["gap"]["value"] == 0  # a pack has the same pixels
    assert abs(lmdb["parity"]["gap"]["value"]) < 1e-5  # float32 sums in another order, three steps long
    runs = [folder.path / run for rung in (files, packed, lmdb) for run in rung["runs"]]
    read = [load(str(run)).recipe.data.source.name for run in runs]
    assert read == ["folder", "folder", "pack", "pack", "lmdb"]
    assert [RunDir(run).read_result().steps for run in runs] == [3] * 5
    assert [rung["prepare_s"] > 0 for rung in (files, packed, lmdb)] == [False, True, True]
    assert ended.err.count("prepared in") == 2 and count_trained(ended.err) == 5
    assert json.loads(folder.result.read_text()) == found
    assert folder.table.is_file() and folder.markdown.is_file() and not folder.data.exists()

    folder.result.unlink()  # as if it had been stopped in its last run
    (runs[-1] / "result.json").unlink()
    ended = paceline("ladder", *WORDS, "--json")
    assert ended.err.count(", known: ") == 4 and count_trained(ended.err) == 1
    assert ended.result["rungs"][0] == files
    assert [rung["runs"] for rung in ended.result["rungs"]] == [rung["runs"] for rung in found["rungs"]]
    assert not folder.data.exists()

    told = paceline("report", "found", "--format", "md").out
    lines = re.findall(r"^paceline (?:data pack|train) .*", told, re.MULTILINE)
    pack, train = [shlex.split(line)[1:] for line in lines]
    assert paceline(*pack).code == 0
    assert "data.source.root=packed.pack" in train
    assert paceline(*train, "--dry-run").code == 0


def count_trained(said: str) -> int:
    """Return how many runs a ladder has told of that were not there before."""
    return sum("images/s" in line and ", known: " not in line for line in said.splitlines())


def test_a_run_that_reads_images_twice_is_not_called_cold(paceline, photographs) -> None:
    paceline("ladder", *WORDS, "--steps", "9").says("10 steps of 4 images", "12 of training", "--steps 2")


DIGITS = """\
# One setting.
recipe: digits
steps: 2
warmup_steps: 0
repeats: 2
rungs:
  - {name: base}
"""


def test_two_tasks_at_once_and_the_ladder_after_them_make_each_run_once(paceline, lines_of, tmp_path) -> None:
    (tmp_path / "own.yaml").write_text(DIGITS)
    words = ("ladder", "own.yaml", "parallel.device=cpu", "--ranks", "1", "--run-dir", "found")
    tasks = [paceline.start(*words, "--task", number) for number in "12"]
    said = [task.communicate() for task in tasks]
    assert [task.wait() for task in tasks] == [0, 0], said
    assert [out.count("images/s") for out, _ in said] == [1, 1]
    folder = ExperimentDir(tmp_path / "found")
    for path in folder.trials.iterdir():  # as on two nodes: here each had the cores that the other wanted
        values = json.loads((path / "result.json").read_text())
        values["verdict"]["bottleneck"] = "compute-bound"
        (path / "result.json").write_text(json.dumps(values))
    runs = {path.name: (path / "result.json").stat().st_mtime_ns for path in folder.trials.iterdir()}
    assert len(runs) == 2 and not folder.result.exists()

    ended = paceline(*words, "--json")
    assert ended.err.count(", known: ") == 2 and count_trained(ended.err) == 0
    assert {Path(run).name for rung in ended.result["rungs"] for run in rung["runs"]} == set(runs)
    assert {path.name: (path / "result.json").stat().st_mtime_ns for path in folder.trials.iterdir()} == runs
    assert all(len(lines_of(folder.trials / run / "attempts.jsonl")) == 2 for run in runs)  # a start and an end
    assert json.loads(folder.result.read_text()) == ended.result
