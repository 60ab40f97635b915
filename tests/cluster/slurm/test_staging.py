"""Jobs on one node share a staged copy of their data, which is removed with the last of them."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SHARED = "/dev/shm"


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Return a folder of synthetic images of two classes."""
    root = tmp_path / "photographs"
    for split, count in (("train", 16), ("val", 4)):
        for number in range(count):
            path = root / split / f"class{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((32, 32, 3), 10 * number, np.uint8)).save(path)
    return root


def test_two_jobs_on_one_node_share_one_copy_and_remove_it(slurm, image_folder: Path, tmp_path: Path) -> None:
    node = slurm.machines["node01"]
    args = ("folder", f"data.source.root={image_folder}", "data.image_size=32", "data.batch_size=8")
    args = (
        *args,
        "model.name=resnet18_cifar",
        "model.width=0.1",
        "data.workers=0",
        "train.steps=4",
        "parallel.threads=1",
        "log.tensorboard=off",
        "log.report=off",
    )
    site = (f"slurm.stage={SHARED}", "slurm.options=[--nodelist=node01]")
    runs = [tmp_path / "first", tmp_path / "second"]
    jobs = [slurm.submit(*args, *site, "--nodes", "1", "--run-dir", str(run))["job_id"] for run in runs]
    copies, together = set(), False
    deadline_s = time.monotonic() + 120
    while (states := [slurm.facts(job)["JobState"] for job in jobs]) != ["COMPLETED"] * 2:
        assert time.monotonic() < deadline_s and "FAILED" not in states, [slurm.output(job) for job in jobs]
        together |= states == ["RUNNING"] * 2
        there = {name for name in node("ls", SHARED).split() if name.startswith("paceline-stage-")}
        copies |= {name.removesuffix(".tmp").removesuffix(".lock") for name in there}
        time.sleep(0.05)
    assert together and len(copies) == 1
    assert not [name for name in node("ls", "-A", SHARED).split() if not name.endswith(".lock")]
    for run in runs:
        assert json.loads((run / "result.json").read_text())["status"] == "completed"
