"""A ladder of real runs over data formats: what it prepares and deletes, and that it resumes after an interruption."""

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
EXACT = ("train.precision=fp32", "parallel.threads=1", "parallel.device=cpu", "log.worst=0")
ARGS = ("forms.yaml", *SMALL, *EXACT, "data.source.root=photos", "--ranks", "1", "--run-dir", "found")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Write twelve training and four validation images, and the ladder file beside them."""
    (tmp_path / "forms.yaml").write_text(LADDER)
    root = tmp_path / "photos"
    noise = np.random.default_rng(0).integers(0, 256, (16, 40, 48, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        path = root / ("train", "val")[number // 12] / ("cat", "dog")[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return root


def test_a_ladder_prepares_each_data_format_once_and_repeats_no_run(paceline, photos, tmp_path) -> None:
    """A single pair of runs proves no gain, so a rung without `keep: always` is dropped."""
    pytest.importorskip("lmdb", reason="the package lmdb is not installed: pip install lmdb")
    completed = paceline("ladder", *ARGS, "--json")
    experiment, folder = completed.result, ExperimentDir(tmp_path / "found")
    files, packed, lmdb = experiment["rungs"]
    assert [(rung["status"], rung["below"]) for rung in experiment["rungs"]] == [
        ("kept", ""),
        ("kept", "files"),
        ("dropped", "packed"),
    ]
    assert packed["parity"]["gap"]["value"] == 0  # a pack has the same pixels
    assert abs(lmdb["parity"]["gap"]["value"]) < 1e-5  # float32, summed in another order for three steps
    runs = [folder.path / run for rung in (files, packed, lmdb) for run in rung["runs"]]
    read = [load(str(run)).recipe.data.source.name for run in runs]
    assert read == ["folder", "folder", "pack", "pack", "lmdb"]
    assert [RunDir(run).read_result().steps for run in runs] == [3] * 5
    assert [rung["prepare_s"] > 0 for rung in (files, packed, lmdb)] == [False, True, True]
    assert completed.err.count("prepared in") == 2 and count_trained(completed.err) == 5
    assert json.loads(folder.result.read_text()) == experiment
    assert folder.table.is_file() and folder.markdown.is_file() and not folder.data.exists()

    folder.result.unlink()  # as if interrupted in its last run
    (runs[-1] / "result.json").unlink()
    completed = paceline("ladder", *ARGS, "--json")
    assert completed.err.count(", known: ") == 4 and count_trained(completed.err) == 1
    assert completed.result["rungs"][0] == files
    assert [rung["runs"] for rung in completed.result["rungs"]] == [rung["runs"] for rung in experiment["rungs"]]
    assert not folder.data.exists()

    markdown = paceline("report", "found", "--format", "md").out
    lines = re.findall(r"^paceline (?:data pack|train) .*", markdown, re.MULTILINE)
    pack, train = [shlex.split(line)[1:] for line in lines]
    assert paceline(*pack).code == 0
    assert "data.source.root=packed.pack" in train
    assert paceline(*train, "--dry-run").code == 0


def count_trained(output: str) -> int:
    """Return the number of runs that a ladder reports as newly trained."""
    return sum("images/s" in line and ", known: " not in line for line in output.splitlines())


def test_a_cold_cache_is_refused_for_a_run_longer_than_the_data(paceline, photos) -> None:
    paceline("ladder", *ARGS, "--steps", "9").assert_error("10 steps of 4 images", "12 of training", "--steps 2")


DIGITS = """\
# One setting.
recipe: digits
steps: 2
warmup_steps: 0
repeats: 2
rungs:
  - {name: base}
"""


def test_concurrent_tasks_and_the_final_ladder_train_each_run_once(paceline, lines_of, tmp_path) -> None:
    (tmp_path / "own.yaml").write_text(DIGITS)
    quiet = ("parallel.device=cpu", "log.tensorboard=off", "log.worst=0")
    args = ("ladder", "own.yaml", *quiet, "--ranks", "1", "--run-dir", "found")
    tasks = [paceline.start(*args, "--task", number) for number in "12"]
    output = [task.communicate() for task in tasks]
    assert [task.wait() for task in tasks] == [0, 0], output
    assert [out.count("images/s") for out, _ in output] == [1, 1]
    folder = ExperimentDir(tmp_path / "found")
    for path in folder.trials.iterdir():  # as on two nodes: on this machine each run lost cores to the other
        values = json.loads((path / "result.json").read_text())
        values["verdict"]["bottleneck"] = "compute-bound"
        (path / "result.json").write_text(json.dumps(values))
    runs = {path.name: (path / "result.json").stat().st_mtime_ns for path in folder.trials.iterdir()}
    assert len(runs) == 2 and not folder.result.exists()

    completed = paceline(*args, "--json")
    assert completed.err.count(", known: ") == 2 and count_trained(completed.err) == 0
    assert {Path(run).name for rung in completed.result["rungs"] for run in rung["runs"]} == set(runs)
    assert {path.name: (path / "result.json").stat().st_mtime_ns for path in folder.trials.iterdir()} == runs
    assert all(len(lines_of(folder.trials / run / "attempts.jsonl")) == 2 for run in runs)  # a start and an end
    assert json.loads(folder.result.read_text()) == completed.result
