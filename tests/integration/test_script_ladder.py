"""`paceline ladder --script` on a real script: what helps is kept, a bait is dropped, and the command can be pasted."""

import json
import os
import subprocess
import sys

import pytest

WAIT_S = 280
SCRIPT = """
import argparse
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--delay", type=float, default=0.0)
args = parser.parse_args()
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)


class Images(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.002)  # a slow disk
        return torch.full((3, 8, 8), index % 10 / 10.0), index % 10


model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
if "RANK" in os.environ:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for images, labels in DataLoader(Images(), batch_size=8):
    time.sleep(args.delay)
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LADDER = """# What a slow loader needs
steps: 12
warmup_steps: 3
repeats: 1
rungs:
  - {name: workers, patch: {workers: 2}, keep: always}
  - {name: bait, args: {--lr: 2.0, --delay: 0}}
  - {name: bucket, patch: {ddp_bucket_mb: 5}}
  - {name: less to wait, args: {--delay: 0}, env: {DEBUG: 0}, keep: always}
"""


@pytest.fixture
def laddered(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "own.yaml").write_text(LADDER)

    def run(*command: str, ladder: str = "own.yaml", code: int = 0) -> str:
        words = ["ladder", "--script", ladder, "--run-dir", "measured", "--", *command]
        done = subprocess.run(
            [sys.executable, "-m", "paceline", *words],
            cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    return run


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_helps_is_kept_and_a_bait_is_dropped(laddered, tmp_path, ranks):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if ranks == 2 else []
    out = laddered(sys.executable, *torchrun, "train.py", "--delay", "0.03")
    result = json.loads((tmp_path / "measured" / "experiment.json").read_text())
    rungs = {rung["name"]: rung for rung in result["rungs"]}
    assert result["ranks"] == ranks
    assert rungs["workers"]["status"] == "kept"
    assert rungs["workers"]["over_below"]["value"] > 1.3, rungs["workers"]
    assert rungs["workers"]["parity"]["gap"]["value"] == 0  # the same images in the same order
    assert rungs["bait"]["status"] == "dropped", rungs["bait"]
    assert rungs["bait"]["why"].startswith("trains differently")
    assert rungs["bucket"]["status"] in (["left_out"] if ranks == 1 else ["kept", "dropped"]), rungs["bucket"]
    if ranks == 1:
        assert rungs["bucket"]["why"] == "not applied: no DistributedDataParallel was created"
    expected = " ".join(["DEBUG=0", sys.executable, *torchrun, "train.py --delay 0"])
    assert result["script"]["best_command"] == expected
    assert result["script"]["best_code"][0] == "DataLoader(..., num_workers=2)"
    assert "DataLoader(..., num_workers=2)" in out
    assert "own" in (tmp_path / "measured" / "report.html").read_text()


def test_a_script_that_fails_is_refused_in_a_line(laddered, tmp_path):
    error = laddered(sys.executable, "train.py", "--no-such-option", code=1)
    assert error.splitlines()[-1].startswith("error: the command took no step of a PyTorch optimizer and ended")
    assert "unrecognized arguments: --no-such-option" in error
    assert (tmp_path / "measured" / "trials" / "01-1" / "output.log").is_file()


def test_requests_that_cannot_be_measured_are_refused(laddered):
    assert "add it after --" in laddered(code=2)
    assert "is not a ladder" in laddered("python", "train.py", ladder="cpu", code=2)
