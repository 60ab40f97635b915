"""A run that was killed and goes on ends with the bits, the logs and the samples of one that was not."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

WORDS = (
    "train",
    "synthetic",
    "model.width=0.1",
    "data.source.num_images=240",
    "data.source.num_val_images=24",
    "data.batch_size=12",
    "data.augment=[pad_crop,flip]",
    "schedule.name=plateau",
    "train.epochs=3",
    "checkpoint.every=7st",
    "log.every=1st",
    "log.samples=true",
    "parallel.threads=1",
)


def killed_after_a_checkpoint(paceline, run: Path, *words: str) -> None:
    process = paceline.start(*words, "--run-dir", str(run), "--json")
    deadline = time.monotonic() + 120
    while not list((run / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)


def without_times(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in ("trained_s", "images_per_s")} for row in rows]


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(paceline, tmp_path: Path, lines_of, ranks: str) -> None:
    words = (*WORDS, "--ranks", ranks)
    whole = paceline(*words, "--run-dir", "whole", "--json").result
    killed_after_a_checkpoint(paceline, tmp_path / "killed", *words)
    assert not (tmp_path / "killed" / "result.json").exists()
    resumed = paceline(*words, "--run-dir", "killed", "--resume", "--json").result
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert (resumed["steps"], resumed["images_seen"]) == (60, 720)
    assert resumed["eval"] == whole["eval"] and resumed["best"] == whole["best"]
    for name in ("steps.jsonl", "evals.jsonl", *(f"steps.rank{rank}.jsonl" for rank in range(int(ranks)))):
        one, other = lines_of(tmp_path / "whole" / name), lines_of(tmp_path / "killed" / name)
        assert without_times(other) == without_times(one) and one
    final = [
        json.loads((tmp_path / name / "checkpoints" / "step-00000060" / "manifest.json").read_text())
        for name in ("whole", "killed")
    ]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert final[0][name] == final[1][name]


def test_a_finished_run_is_left_as_it_is(paceline, tmp_path: Path) -> None:
    first = paceline("train", "train.steps=3", "model.width=0.1", "parallel.threads=1", "--run-dir", "run", "--json")
    written = (tmp_path / "run" / "result.json").stat().st_mtime_ns
    again = paceline("train", "run", "--resume", "--json")
    assert again.result == first.result
    assert (tmp_path / "run" / "result.json").stat().st_mtime_ns == written


def test_a_changed_recipe_is_refused_and_named(paceline) -> None:
    words = ("train", "train.steps=3", "model.width=0.1", "parallel.threads=1", "--run-dir", "run")
    assert paceline(*words).code == 0
    paceline(*words, "--resume", "optim.lr=0.5").says("--resume: run", "optim.lr=0.05 (now 0.5)")
    paceline(*words).says("--run-dir: run already holds a run", "--resume")
    assert paceline(*words, "--resume", "log.every=1st").code == 0
