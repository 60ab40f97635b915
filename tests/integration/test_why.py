"""`paceline why` on real runs: the planted cause comes first, and putting it back explains the gap."""

import json
import os
import subprocess
import sys

import pytest

WAIT_S = 240
SCRIPT = """
import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int)
parser.add_argument("--seed", type=int)
options = parser.parse_args()
torch.manual_seed(options.seed)


class Images(Dataset):
    def __len__(self):
        return 1280

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((3, 16, 16), index / 1280), index % 10


model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1568, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(Images(), batch_size=16, num_workers=options.workers, persistent_workers=options.workers > 0)
for images, labels in loader:
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def paceline(folder, *words):
    command = [sys.executable, "-m", "paceline", *map(str, words)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=WAIT_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a watched run that loads data in workers, and one that does not."""
    folder = tmp_path_factory.mktemp("why")
    (folder / "train.py").write_text(SCRIPT)
    for name, workers, seed in (("monday", 3, 0), ("friday", 0, 1)):
        script = [sys.executable, "train.py", "--workers", workers, "--seed", seed]
        done = paceline(folder, "watch", "--run-dir", name, "--", *script)
        assert done.returncode == 0, done.stderr
    return folder


def test_fewer_workers_are_named_first(folder):
    done = paceline(folder, "why", "monday", "friday", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["speed"]["verdict"] == "slower"
    assert result["speed"]["parts"][0]["name"] == "data_wait"
    assert result["causes"][0]["difference"] == {"name": "argv.--workers", "a": "3", "b": "0"}
    assert "argv.--seed" not in {each["difference"]["name"] for each in result["causes"]}
    shown = paceline(folder, "why", "monday", "friday")
    assert "workers" in shown.stdout


def test_a_difference_that_is_put_back_explains_the_gap(folder):
    options = ("--trust-code", "--repeats", "2", "--steps", "20", "--json")
    done = paceline(folder, "why", "monday", "friday", "--rerun", *options)
    assert done.returncode == 0, done.stderr
    rerun = json.loads(done.stdout)["rerun"]
    (row,) = [each for each in rerun["rows"] if each["differences"] == ["argv.--workers"]]
    assert row["ratio"]["value"] > 1.5
    assert row["share"] > 0.5


def test_a_recorded_command_runs_only_with_consent(folder):
    before = set(folder.glob("runs/why-*"))
    done = paceline(folder, "why", "monday", "friday", "--rerun")
    assert done.returncode == 2
    assert all(word in done.stderr for word in ("monday: command: ", "train.py", "--trust-code"))
    assert set(folder.glob("runs/why-*")) == before


def test_a_mistake_is_one_line(folder):
    too_long = ("monday", "friday", "--rerun", "--trust-code", "--repeats", "2", "--steps", "1000")
    for words, place in (
        (("monday", "monday"), "monday"),
        (("monday", "nowhere"), "nowhere"),
        (too_long, "(lower --steps"),
    ):
        done = paceline(folder, "why", *words)
        assert done.returncode == 2
        *_, last = done.stderr.splitlines()
        assert last.startswith("error: ")
        assert place in last
        assert "Traceback" not in done.stderr
