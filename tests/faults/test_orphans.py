"""Nothing outlives a killed launcher, even before torch is imported or without standard input.

The moments are a few of those of `benchmarks/orphans.py`, whose full form is recorded in `benchmarks/results`.
"""

import importlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SEED, LATEST_S = 3, 5.0
WITHIN_S = 10.0
SMALL = ("model.width=0.1", "data.workers=0", "parallel.threads=1", "log.tensorboard=off", "log.report=off")


@pytest.fixture(scope="module")
def orphans() -> Iterator[ModuleType]:
    """The benchmark; it imports its neighbors by name, like a program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("orphans")


@pytest.fixture
def started(orphans: ModuleType, tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen, str]]]:
    """Return a function that starts a marked command without standard input; the test kills what is left of it."""
    marks: list[str] = []

    def start(*args: str) -> tuple[subprocess.Popen, str]:
        marks.append(uuid.uuid4().hex)
        command = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-P", "-m", "paceline", *args]
        output = (tmp_path / "said").open("wb")
        environ = {**os.environ, orphans.MARK: marks[-1]}
        with output:
            process = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=output, stderr=output)
        return process, marks[-1]

    yield start
    for mark in marks:
        for pid in orphans.alive(mark):
            psutil.Process(pid).kill()


def wait_for(is_so: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children_of(launcher: int) -> list[int]:
    """Return the children that have executed their command: ranks, or a launcher that `scale` has started.

    Until then, a child looks like its parent for a moment, and ties itself to it within milliseconds.
    """
    found = []
    for child in psutil.Process(launcher).children():
        with suppress(psutil.NoSuchProcess):
            args, is_rank = child.cmdline(), "RANK" in child.environ()
            if "process.py" not in " ".join(args[:4]) and (is_rank or "train" in args):
                found.append(child.pid)
    return found


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


# matrix: 15
@pytest.mark.parametrize("args", [("train",), ("doctor",), ("scale", "--repeats", "1")], ids=" ".join)
def test_ranks_stopped_before_they_import_torch_end_with_their_launcher(orphans, started, args) -> None:
    """Every process is stopped by SIGSTOP as soon as it starts, and could not end by itself."""
    process, mark = started(*args, "--ranks", "2")
    wait_for(lambda: len(children_of(process.pid)) == (1 if args[0] == "scale" else 2), within_s=60)
    family = children_of(process.pid)
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    assert not any(map(has_torch, family))
    process.kill()
    process.wait()
    deadline = time.monotonic() + WITHIN_S
    while orphans.alive(mark) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [orphans.command_line(pid) for pid in orphans.alive(mark)] == []


# matrix: 15
def test_ranks_without_stdin_train_and_end_with_their_launcher(orphans, started, tmp_path: Path) -> None:
    """The store's socket would get the file descriptor of stdin, and be replaced in rank 0."""
    args = ("digits", *SMALL, "data.batch_size=64", "train.epochs=10000", "--ranks", "2", "--run-dir", "run")
    process, mark = started("train", *args)
    steps = tmp_path / "run" / "steps.jsonl"
    wait_for(lambda: process.poll() is not None or (steps.exists() and steps.stat().st_size > 0), within_s=120)
    assert process.poll() is None, (tmp_path / "said").read_text()
    assert (tmp_path / "said").read_text().startswith("paceline ")
    assert ": starting 2 ranks on " in (tmp_path / "said").read_text().splitlines()[0]
    family = orphans.alive(mark)
    assert len(family) >= 3  # the launcher and two ranks
    for pid in family:
        if pid != process.pid:
            os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.wait()
    wait_for(lambda: not orphans.alive(mark), within_s=WITHIN_S)


# matrix: 15
def test_no_process_outlives_a_launcher_killed_at_a_random_moment(orphans, monkeypatch, tmp_path: Path) -> None:
    """The last kill is late enough for ranks to have started, even on a busy machine."""
    monkeypatch.setattr(orphans, "FIRST_S", LATEST_S)
    kills = orphans.plan_kills(1, [2], ["train"], ["plain", "setsid"], SEED)
    assert {kill.how for kill in kills} == {"plain", "setsid"}
    killed = []
    for kill in [*kills, *(replace(kills[0], moment_s=moment_s) for moment_s in (10.0, 30.0, 60.0))]:
        killed.append(orphans.kill_one(kill, tmp_path, random.Random(SEED)))
        assert not killed[-1].left and not killed[-1].had_ended
        if len(killed) >= len(kills) and any(each.descendants for each in killed):
            return
    pytest.fail("there never was a rank")


# matrix: 15
def test_the_benchmark_detects_and_kills_a_surviving_process(orphans, monkeypatch, tmp_path: Path) -> None:
    """A process that is not tied to its parent is detected by its mark, named, and killed."""
    monkeypatch.setattr(orphans, "GONE_LIMIT_S", 0.5)
    script = "import subprocess, sys; subprocess.Popen(['sleep', '60'], start_new_session=True).wait()"
    monkeypatch.setattr(orphans, "command_of", lambda *asked: [sys.executable, "-c", script])
    killed = orphans.kill_one(orphans.Kill("train", 1, "setsid", 1.0, stops=True), tmp_path, random.Random(0))
    assert killed.descendants == 1 and killed.left == ("sleep 60",) and killed.survival_s >= 0.5
    assert orphans.summary([killed])["alive_after_ten_s"] == 1
