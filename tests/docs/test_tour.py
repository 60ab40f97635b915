"""The files that the tour lists for a batch and a checkpoint are those that a run enters."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs/project/tour.md").read_text(encoding="utf-8")
SCRIPT = Path(__file__).with_name("trace_tour.py")
PORT = "29873"
TIMEOUT_S = 200
WALKS = {
    "worker": "### In the worker process",
    "step": "### On the rank",
    "checkpoint": "### On the main thread",
    "writer": "### In the writer's thread",
}


def listed_files(heading: str) -> list[str]:
    section = re.split(r"^#{2,3} ", TOUR.split(f"\n{heading}\n")[1], flags=re.MULTILINE)[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    return sorted(file for cell in cells for file in re.findall(r"`([\w/]+\.py)`", cell))


@pytest.mark.long
def test_a_run_enters_the_files_that_the_tour_lists(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for number in range(64):
        path = tmp_path / "photos" / "train" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(path)
    args = [
        *("train", "folder", f"data.source.root={tmp_path / 'photos'}", "data.image_size=32", "data.batch_size=8"),
        *("data.loader=processes", "data.workers=1", "model.name=resnet18_cifar", "model.width=0.1"),
        *("parallel.device=cpu", "train.epochs=auto", "train.steps=9", "train.eval_every=off", "schedule.warmup=0st"),
        *("checkpoint.every=8st", "measure.warmup_steps=2", "--run-dir", str(tmp_path / "run")),
    ]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, tmp_path / "trace", *args],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    for name, heading in WALKS.items():
        entered, listed = set(json.loads((tmp_path / f"trace.{name}.json").read_text())), set(listed_files(heading))
        assert (entered - listed, listed - entered) == (set(), set()), f"{name}: not listed, and not entered"
