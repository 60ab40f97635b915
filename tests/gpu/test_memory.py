"""Memory on a GPU: `train.accumulate=auto` tries steps until one fits, and a step that does not fit is one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PROGRAM = """
import sys, torch
torch.cuda.set_per_process_memory_fraction(170e6 / torch.cuda.mem_get_info()[1])
from paceline.cli import main
main()
"""


def train(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    words = ["synthetic", "model.width=0.25", "train.steps=2", "data.source.num_images=512", "data.batch_size=256"]
    command = [sys.executable, "-c", PROGRAM, "train", *words, "data.source.num_val_images=8", "parallel.device=cuda"]
    return subprocess.run(
        [*command, "--json", *args], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.timeout(600)
def test_auto_finds_the_micro_batch_that_one_forward_pass_runs_out_of_memory_without(tmp_path: Path) -> None:
    whole = train(tmp_path, "train.accumulate=1")
    assert whole.returncode == 2 and whole.stdout == ""
    line = whole.stderr.splitlines()[-1]
    assert "Traceback" not in whole.stderr
    assert line.startswith("error: train.accumulate: 1: rank 0 ran out of the 170 MB of its GPU when it asked for")
    assert "in step 1, with micro-batches of 256 images (set train.accumulate=auto, or at least " in line
    fitted = train(tmp_path, "train.accumulate=auto")
    assert fitted.returncode == 0, fitted.stderr
    measured = json.loads(fitted.stdout)["provenance"]["measured_batch"]
    assert measured["accumulate"] > 1 and 0 < measured["needed_bytes"] <= measured["allowed_bytes"] < 170e6
