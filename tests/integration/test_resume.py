"""A run that was killed and goes on ends with the bits, the logs and the samples of one that was not."""

import json
import os
import shutil
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


@pytest.mark.parametrize("ranks", ["1", "2", "3", "4"])
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


def test_the_logs_of_a_resumed_run_are_those_of_one_that_was_not(paceline, tmp_path: Path, lines_of) -> None:
    """The cadences of log, evaluation and checkpoint do not divide one another, so a record spans the interruption."""
    words = (*WORDS, "train.epochs=1", "checkpoint.every=3st", "log.every=4st", "train.eval_every=3st")
    words = (*words, "checkpoint.keep=9", "log.tensorboard=on", "--ranks", "2")
    paceline(*words, "--run-dir", "whole", "--json").result  # noqa: B018
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "result.json").unlink()
    for path in (tmp_path / "cut" / "checkpoints").iterdir():
        if int(path.name[-2:]) > 9:
            shutil.rmtree(path)
    paceline(*words, "--run-dir", "cut", "--resume", "--json").result  # noqa: B018
    for name in ("steps.jsonl", "evals.jsonl"):
        one, other = lines_of(tmp_path / "whole" / name), lines_of(tmp_path / "cut" / name)
        assert without_times(other) == without_times(one) and len(one) > 4
    points = [scalars(tmp_path / name / "tensorboard") for name in ("whole", "cut")]
    assert points[0] == points[1] and len(points[0]) > 10


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reading.EventAccumulator(str(folder)).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag != "images_per_s"]
    return {(tag, event.step): event.value for tag in tags for event in events.Scalars(tag)}


def test_a_run_that_had_met_its_target_takes_no_more_steps(paceline, tmp_path: Path) -> None:
    words = (*WORDS, "train.stop.top1=0.001", "train.eval_every=3st", "checkpoint.every=3st", "--run-dir", "run")
    first = paceline(*words, "--json").result
    assert (first["status"], first["steps"]) == ("target_reached", 3)
    (tmp_path / "run" / "result.json").unlink()
    again = paceline(*words, "--resume", "--json").result
    assert (again["steps"], again["status"]) == (3, "target_reached")
    assert again["weights_sha256"] == first["weights_sha256"]


def test_another_number_of_ranks_goes_on_with_the_same_samples(paceline, tmp_path: Path, lines_of) -> None:
    words = (*WORDS, "train.epochs=1", "model.norm=none")
    paceline(*words, "--run-dir", "whole", "--json").result  # noqa: B018
    killed_after_a_checkpoint(paceline, tmp_path / "cut", *words, "--ranks", "2")
    paceline(*words, "--run-dir", "cut", "--resume", "--json", "--ranks", "3").result  # noqa: B018
    whole = lines_of(tmp_path / "whole" / "steps.rank0.jsonl")
    parts = [lines_of(tmp_path / "cut" / f"steps.rank{rank}.jsonl") for rank in range(3)]
    for step in range(15, 20):  # surely after the interruption
        last = [next(record for record in part if record["step"] == step) for part in parts]
        assert [pair for record in last for pair in record["crc32"]] == whole[step]["crc32"]
        assert [sample for record in last for sample in record["samples"]] == whole[step]["samples"]


def test_a_finished_run_is_left_as_it_is(paceline, tmp_path: Path) -> None:
    first = paceline("train", "train.steps=3", "model.width=0.1", "parallel.threads=1", "--run-dir", "run", "--json")
    written = (tmp_path / "run" / "result.json").stat().st_mtime_ns
    for ranks in ("1", "2", "4"):
        again = paceline("train", "run", "--resume", "--json", "--ranks", ranks)
        assert again.result == first.result
    assert (tmp_path / "run" / "result.json").stat().st_mtime_ns == written


def test_a_changed_recipe_is_refused_and_named(paceline) -> None:
    words = ("train", "train.steps=3", "model.width=0.1", "parallel.threads=1", "--run-dir", "run")
    assert paceline(*words).code == 0
    paceline(*words, "--resume", "optim.lr=0.5").says("--resume: run", "optim.lr=0.1 (now 0.5)")
    paceline(*words).says("--run-dir: run already holds a run", "--resume")
    assert paceline(*words, "--resume", "log.every=1st").code == 0
