"""A run is completed only if its final weights are on disk; otherwise it resumes from the last checkpoint."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ARGS = (
    "train",
    "synthetic",
    "model.width=0.2",
    "data.source.num_images=96",
    "data.source.num_val_images=12",
    "data.source.image_size=16",
    "data.batch_size=12",
    "train.steps=12",
    "train.eval_every=6st",
    "checkpoint.every=3st",
    "checkpoint.keep=50",
    "log.tensorboard=off",
    "log.report=off",
    "parallel.threads=1",
)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a tmpfs with room for one checkpoint, but not for a second one of any size."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", disk], capture_output=True, timeout=30)
    if mounted.returncode != 0:
        pytest.skip(f"mounting a small disk is not allowed: {mounted.stderr.decode().strip()}")
    (disk / "fill").write_bytes(bytes(int(7.6 * (1 << 20))))
    yield disk
    subprocess.run(["umount", "-l", disk], check=True, timeout=30)


# matrix: 30
def test_a_run_that_cannot_save_its_final_weights_fails_and_is_resumed(
    paceline, full_disk: Path, tmp_path: Path, lines_of
) -> None:
    uninterrupted = paceline(*ARGS, "--json", "--run-dir", str(tmp_path / "whole")).result
    run = full_disk / "run"
    completed = paceline(*ARGS, "--json", "--run-dir", str(run))
    assert completed.code == 4, completed.err
    (error,) = [line for line in completed.err.splitlines() if line.startswith("error: ")]
    assert "last step, 12, could not be saved" in error and "step-00000003" in error and "--resume" in error
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "failed" and result == json.loads(completed.out)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]
    told = [line["message"] for line in lines_of(run / "warnings.jsonl") if "step" in line["message"]]
    assert len(told) == 2 and "failed for the same reason" in told[1], told

    (full_disk / "fill").unlink()
    judged = paceline("eval", str(run), "--json")
    assert judged.code == 0 and "last step, 12, is missing; step-00000003 is used" in judged.err

    resumed = paceline("train", str(run), "--resume", "--json").result
    assert resumed["status"] == "completed" and resumed["weights_sha256"] == uninterrupted["weights_sha256"]
    assert "was already complete" in paceline("train", str(run), "--resume", "--json").err

    shutil.rmtree(run / "checkpoints" / "step-00000012")  # as by versions that did not check this
    again = paceline("train", str(run), "--resume", "--json")
    assert again.result["weights_sha256"] == uninterrupted["weights_sha256"] and "was already complete" not in again.err
    assert (run / "checkpoints" / "step-00000012").is_dir()
