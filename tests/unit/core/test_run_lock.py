"""`run_lock` in `core.run_dir`: one process at a time writes to a run directory."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import RecipeError
from paceline.core.run_dir import LOCK, RunDir, run_lock

WAIT_S = 30
HOLD = """
import sys
from pathlib import Path
from paceline.core.run_dir import run_lock
with run_lock(Path(sys.argv[1]), int(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""
FORK = """
import os, sys
from pathlib import Path
from paceline.core.run_dir import run_lock
with run_lock(Path(sys.argv[1])):
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdin.read()
        os._exit(0)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Return a process, started by number 7, that holds the lock of `tmp_path` until its stdin is closed."""
    command = [sys.executable, "-c", HOLD, str(tmp_path), "7"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()
            process.wait(WAIT_S)


KILLED = """
import os, sys
from pathlib import Path
from paceline.core.run_dir import run_lock
with run_lock(Path(sys.argv[1]), started_s=float(sys.argv[2]), launch=sys.argv[3]):
    os.kill(os.getpid(), 9)
"""


def refusal(folder: Path) -> str:
    with pytest.raises(RecipeError) as caught, run_lock(folder):
        pass
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


# matrix: 23
def test_a_second_process_is_refused_with_the_owner_of_the_lock(holder, tmp_path: Path) -> None:
    host = os.uname().nodename
    assert refusal(tmp_path) == (
        f"--run-dir: {tmp_path} is in use by process {holder.pid} on {host}, started by 7 "
        "(wait for it, stop it with `kill 7`, or name another)"
    )
    assert refusal(tmp_path).startswith("--run-dir: "), "a refusal must not let go of the other's lock"


def test_a_lock_without_an_owner_still_holds(holder, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("")
    assert refusal(tmp_path) == (f"--run-dir: {tmp_path} is in use by another process (wait for it, or name another)")


# matrix: 23
def test_a_killed_holder_leaves_no_lock(holder, tmp_path: Path) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait(WAIT_S)
    with run_lock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_the_first_start_of_a_run_is_known_after_its_first_processes_were_killed(tmp_path: Path) -> None:
    for started_s in ("100.5", "200.5"):
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), started_s, "job 7"], timeout=WAIT_S, check=False)
    with run_lock(tmp_path / "other", started_s=300.5, resume=True) as first_s:
        assert first_s == 300.5
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), "200.5", ""], timeout=WAIT_S, check=False)
    with run_lock(tmp_path, started_s=300.5) as first_s:
        assert first_s == 300.5  # a run of its own, in a folder that another has left empty


@pytest.mark.parametrize(("launch", "resume"), [("job 7", False), ("", True)])
def test_a_process_that_resumes_the_run_gets_its_first_start(tmp_path: Path, launch: str, resume: bool) -> None:
    for started_s in ("100.5", "200.5"):
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), started_s, "job 7"], timeout=WAIT_S, check=False)
    with run_lock(tmp_path, started_s=300.5, launch=launch, resume=resume) as first_s:
        assert first_s == 100.5


def test_a_worker_that_outlives_its_rank_does_not_keep_the_lock(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        worker = int(process.stdout.readline())
        assert process.wait(WAIT_S) == -signal.SIGKILL
        os.kill(worker, 0)  # it lives, with the descriptor open
        with run_lock(tmp_path):
            pass
        process.stdin.close()


def test_files_of_a_run_stay_and_an_empty_folder_is_restored(tmp_path: Path) -> None:
    kept, empty, new = tmp_path / "kept", tmp_path / "empty", tmp_path / "new"
    empty.mkdir()
    for folder in (kept, empty, new):
        with run_lock(folder):
            assert (folder / LOCK).is_file()
            if folder == kept:
                (folder / "recipe.yaml").touch()
    assert sorted(path.name for path in kept.iterdir()) == [LOCK, "recipe.yaml"]
    assert not list(empty.iterdir()) and not new.exists()


def test_a_claimed_folder_is_released_while_it_holds_only_the_lock(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("runs/digits-1")
    path.mkdir(parents=True)
    with run_lock(path):
        RunDir(path).release()
        assert not path.exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file" / "run") == (
        f"--run-dir: {tmp_path}/file/run cannot be written to: Not a directory (name another)"
    )
