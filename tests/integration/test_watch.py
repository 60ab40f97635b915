"""`paceline watch` on real scripts: planted causes are named, on one and two ranks, and the losses stay the same."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.watch_result import WatchResult, read_watch_result
from paceline.measure.bottleneck import LOST_CPU_SHARE

WAIT_S = 180
SCRIPT = """
import logging
import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

cause = sys.argv[1]
num_images = 1280 if cause == "none" else 640
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
rank = int(os.environ.get("RANK", 0))
is_planted = rank == int(os.environ.get("WORLD_SIZE", 1)) - 1
torch.set_num_threads(1)
torch.manual_seed(0)


class Images(Dataset):
    def __len__(self):
        return num_images

    def __getitem__(self, index):
        if cause == "data" and is_planted:
            time.sleep(0.001)
        return torch.full((3, 16, 16), index / num_images), index % 10


class Late(nn.Module):
    def forward(self, images):
        if cause == "forward" and is_planted:
            time.sleep(0.03)
        return images


class Slow(logging.Handler):
    def emit(self, record):
        time.sleep(0.03)


logger = logging.getLogger("script")
logger.setLevel(logging.INFO)
logger.addHandler(Slow() if cause == "log" and is_planted else logging.NullHandler())
model = nn.Sequential(Late(), nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(4608, 10))
if "RANK" in os.environ:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for epoch in range(2):
    for images, labels in DataLoader(Images(), batch_size=32):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        logger.info("step")
    model.eval()
    with torch.no_grad():
        for images, labels in DataLoader(Images(), batch_size=64) if cause == "evaluate" else ():
            time.sleep(0.2)
            model(images)
    model.train()
if rank == 0:
    print("losses", [loss.item().hex() for loss in losses])
if "RANK" in os.environ:
    torch.distributed.destroy_process_group()
    time.sleep(0.5)  # as in scripts/ddp.py: a thread of gloo may still free a tensor
"""


@pytest.fixture
def watched(paceline, tmp_path):
    """Return a function that watches the script with a cause, and returns its output and the result."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(cause: str, ranks: int = 1) -> tuple[str, WatchResult]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *(torchrun if ranks > 1 else []), "train.py", cause]
        done = paceline("watch", "--run-dir", cause, "--", *command)
        assert done.code == 0, done.err
        return done.out, read_watch_result(tmp_path / cause)

    return run


def test_losses_and_output_are_those_of_the_script_alone(watched, tmp_path):
    out, result = watched("none")
    alone = [sys.executable, "train.py", "none"]
    assert out == subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S).stdout
    assert out.count("0x") == 80
    assert (result.steps, result.measured_steps, result.world_size) == (80, 70, 1)
    assert sum(each.share for each in result.stages.values()) == pytest.approx(1, abs=1e-3)
    known_s = result.start_up_s + result.steps_s + sum(result.pauses.values())
    assert known_s == pytest.approx(result.wall_s, rel=0.05)
    assert result.num_pauses["epoch_boundary"] >= 2


CAUSES = {"data": "input-bound", "log": "logging-bound", "evaluate": "evaluation-bound", "forward": "compute-bound"}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_cause_is_named(watched, cause):
    _, result = watched(cause)
    assert result.verdict["bottleneck"] == CAUSES[cause], result.verdict


STAGES = {"data": "data_wait", "log": "log", "forward": "forward"}


@pytest.mark.parametrize("cause", ["data", pytest.param("log", marks=pytest.mark.long), "forward"])
def test_a_late_rank_is_named_with_its_stage(watched, cause):
    _, result = watched(cause, ranks=2)
    # Beside other tests, which may be what makes a rank late.
    is_starved = result.cpu is not None and result.cpu.share >= LOST_CPU_SHARE
    named = ("straggler-bound", "unknown") if is_starved else ("straggler-bound",)
    assert result.verdict["bottleneck"] in named, result.verdict
    assert (result.straggler.rank, result.straggler.stage) == (1, STAGES[cause])
    assert [each.rank for each in result.timeline] == [0, 1]


def test_a_script_that_fails_is_summed_up_until_then(paceline, tmp_path):
    failing = SCRIPT.replace("losses.append", "assert len(losses) < 50, 'planted'\n        losses.append")
    (tmp_path / "train.py").write_text(failing)
    done = paceline("watch", "--run-dir", "failed", "--", sys.executable, "train.py", "none")
    assert done.code == 1
    assert "planted" in done.err
    result = read_watch_result(Path(tmp_path / "failed"))
    assert (result.exit_code, result.steps >= 49) == (1, True)
