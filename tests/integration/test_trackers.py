"""W&B, MLflow and trackio record an interrupted and resumed run as one run, with every step once.

Nothing is uploaded: no user is logged in, and the process has no network access.
"""

import importlib.util
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.core.run_dir import read_lines
from paceline.parallel.launch import PREEMPTED

WAIT_S = 120
GUARDED = Path(__file__).with_name("guarded.py")
TRACKERS = ("wandb", "mlflow", "trackio")
INSTALLED = [name for name in TRACKERS if importlib.util.find_spec(name)]
ARGS = (
    *("train", "synthetic", "model.width=0.1", "data.source.num_images=240", "data.source.num_val_images=24"),
    *("data.batch_size=12", "train.epochs=3", "train.eval_every=5st", "checkpoint.every=7st", "log.every=1st"),
    *("data.workers=1", "parallel.threads=1", "parallel.device=cpu", "log.tensorboard=off", "log.report=off", "--json"),
)
Curve = list[tuple[int, float]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with all installed trackers that was preempted, lost a checkpoint, and was resumed."""
    if not INSTALLED:
        pytest.skip(f"none of {', '.join(TRACKERS)} is installed (pip install 'paceline[wandb,mlflow,trackio]')")
    folder = tmp_path_factory.mktemp("trackers")
    run = folder / "run"
    args = (*ARGS, f"log.sinks=[{', '.join(INSTALLED)}]", "--run-dir", str(run))
    stopped = start(folder, *args)
    checkpoints = run / "checkpoints"
    deadline = time.monotonic() + WAIT_S
    while len(list(checkpoints.glob("step-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(stopped.pid, signal.SIGTERM)
    _, err = stopped.communicate(timeout=WAIT_S)
    assert stopped.returncode == PREEMPTED, err
    shutil.rmtree(max(checkpoints.glob("step-*")))  # so that steps that were logged already are repeated
    out, err = start(folder, *args, "--resume").communicate(timeout=WAIT_S)
    assert json.loads(out)["status"] == "completed", err  # standard output is only the JSON
    assert not (run / "warnings.jsonl").exists(), (run / "warnings.jsonl").read_text()
    assert (folder / "attempts").read_text() == ""
    return run


def start(folder: Path, *args: str) -> "subprocess.Popen[str]":
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
    environ |= {"HOME": str(folder), "NETRC": str(folder / "netrc"), "TRACKIO_DIR": str(folder / "trackio")}
    return subprocess.Popen(
        [sys.executable, str(GUARDED), str(folder / "attempts"), *args],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wandb_curve(run: Path, name: str) -> Curve:
    """Return a curve of W&B's newest folder, which is the one to sync and contains all of the run."""
    before, newest = (
        [(int(row["_step"]), row[name]) for row in history(page.read_bytes()) if name in row]
        for page in wandb_files(run)
    )
    assert before and newest[: len(before)] == before
    return newest


def wandb_files(run: Path) -> list[Path]:
    """Return the file of each process of the run, in order; the run id in their names makes them one run in W&B."""
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({page.name for page in files}) == 1
    assert (run / "wandb" / "latest-run").resolve() == files[1].parent
    return files


def history(data: bytes) -> Iterator[dict[str, float]]:
    """Yield the rows of a W&B file: protobuf records in the format of LevelDB's log, after a header of 7 bytes.

    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    from wandb.proto.wandb_internal_pb2 import Record

    at, record_bytes = 7, b""
    while at + 7 <= len(data):
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if kind == 0 or 32_768 - at % 32_768 < 7:  # the rest of a block is padding
            at += 32_768 - at % 32_768
            continue
        record_bytes += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the last part of a record, or all of it
            record, record_bytes = Record.FromString(record_bytes), b""
            if record.HasField("history"):
                items = record.history.item
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def mlflow_curve(run: Path, name: str) -> Curve:
    """Return a curve from MLflow's files, whose lines are time, value and step."""
    (path,) = (run / "mlruns").glob(f"*/*/metrics/{name}")
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(int(step), float(value)) for _, value, step in lines]


def trackio_curve(run: Path, name: str) -> Curve:
    """Return a curve from trackio's database."""
    (path,) = (run.parent / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert len({run_name for run_name, _, _ in rows}) == 1
    return [(step, json.loads(metrics)[name]) for _, step, metrics in rows if name in json.loads(metrics)]


CURVES: dict[str, Callable[[Path, str], Curve]] = {
    "wandb": wandb_curve,
    "mlflow": mlflow_curve,
    "trackio": trackio_curve,
}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_resumed_run_is_one_tracker_run_with_every_record(run: Path, tracker: str) -> None:
    if tracker not in INSTALLED:
        pytest.skip(f"{tracker} is not installed (pip install 'paceline[{tracker}]')")
    steps, evals = list(read_lines(run / "steps.jsonl")), list(read_lines(run / "evals.jsonl"))
    assert len(steps) == 60 and len(evals) == 12
    losses, top1 = CURVES[tracker](run, "train/loss"), CURVES[tracker](run, "val/top1")
    # The steps since the checkpoint may come twice, with the same values.
    assert sorted(set(losses)) == [(row["step"], row["loss"]) for row in steps]
    assert sorted(set(top1)) == [(row["step"], row["top1"]) for row in evals]
