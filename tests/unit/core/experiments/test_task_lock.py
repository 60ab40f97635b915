"""`core.experiments.task_lock`: tasks of an experiment exclude each other and the whole experiment."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.core.errors import RecipeError
from paceline.core.experiments.task_lock import exclusive_lock, lock_task, write_shared
from paceline.core.run_dir import LOCK, run_lock

WAIT_S = 30
HOLD = """
import sys
from pathlib import Path
from paceline.core.experiments.task_lock import exclusive_lock, lock_task
from paceline.core.run_dir import run_lock
lock, folder = sys.argv[1], Path(sys.argv[2])
context = {"whole": lambda: run_lock(folder), "alone": lambda: exclusive_lock(folder / "made")}
with context[lock]() if lock in context else lock_task(folder, int(lock)):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def locked(lock: str, folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Return a process that locks the `whole` experiment, a task by number, or a file (`alone`)."""
    command = [sys.executable, "-c", HOLD, lock, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()
            process.wait(WAIT_S)


def test_different_tasks_run_at_the_same_time_but_not_the_same_one(tmp_path: Path) -> None:
    with locked("1", tmp_path) as other:
        message = rf"^--run-dir: {tmp_path}: task 1 is being run by process {other.pid} on \S+ \(wait for it\)$"
        with pytest.raises(RecipeError, match=message), lock_task(tmp_path, 1):
            pass
        with lock_task(tmp_path, 2):
            assert (tmp_path / LOCK).is_file()
        message = f"^--run-dir: {tmp_path}: task 1 is being run by another process"
        with pytest.raises(RecipeError, match=message), lock_task(tmp_path, 1):
            pass


def test_the_whole_experiment_and_a_task_exclude_each_other(tmp_path: Path) -> None:
    with locked("1", tmp_path) as task:
        in_use = f"^--run-dir: {tmp_path} is in use by process {task.pid} on "
        with pytest.raises(RecipeError, match=in_use), run_lock(tmp_path):
            pass
    with locked("whole", tmp_path) as whole:
        message = f"all of it is being run by process {whole.pid} on"
        with pytest.raises(RecipeError, match=message), lock_task(tmp_path, 1):
            pass


def test_the_error_does_not_name_a_task_that_has_ended(tmp_path: Path) -> None:
    with locked("1", tmp_path):
        with lock_task(tmp_path, 2):
            pass
        with pytest.raises(RecipeError, match="is in use by another process"), run_lock(tmp_path):
            pass


def test_a_killed_task_leaves_no_lock(tmp_path: Path) -> None:
    with locked("1", tmp_path) as other:
        other.send_signal(signal.SIGKILL)
        other.wait(WAIT_S)
        with lock_task(tmp_path, 1):
            pass
        with run_lock(tmp_path):
            pass


def test_an_exclusive_lock_makes_others_wait(tmp_path: Path) -> None:
    waited: list[str] = []
    with locked("alone", tmp_path) as other:

        def end_it() -> None:
            waited.append("message")
            other.kill()

        with exclusive_lock(tmp_path / "made", end_it):
            assert other.wait(WAIT_S) == -signal.SIGKILL
    with exclusive_lock(tmp_path / "made", lambda: pytest.fail("no process has it")):
        assert waited == ["message"]


def test_a_file_with_equal_text_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    write_shared(path, "seed: é\n")
    there = path.stat()
    write_shared(path, "seed: é\n")
    assert path.stat().st_ino == there.st_ino and path.stat().st_mtime_ns == there.st_mtime_ns
    write_shared(path, "seed: 1\n")
    assert path.read_text(encoding="utf-8") == "seed: 1\n" and path.stat().st_ino != there.st_ino
    assert [each.name for each in tmp_path.iterdir()] == ["recipe.yaml"]


def test_an_unwritable_folder_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = rf"^--run-dir: {tmp_path}/file cannot be written to: Not a directory \(name another\)$"
    with pytest.raises(RecipeError, match=message), lock_task(tmp_path / "file", 1):
        pass
    with pytest.raises(OSError, match="Not a directory"):
        write_shared(tmp_path / "file" / "x", "")
