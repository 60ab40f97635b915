"""A full, closed or disconnected console costs a run only a warning in its run directory."""

import contextlib
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ARGS = (
    "train",
    "synthetic",
    "model.width=0.1",
    "data.source.num_images=48",
    "data.source.num_val_images=12",
    "data.batch_size=12",
    "train.steps=4",
    "log.every=1st",
    "log.tensorboard=off",
    "log.report=off",
    "parallel.threads=1",
    "--run-dir",
    "run",
)
LIMIT_S = 120


def result_of(run: Path) -> dict:
    return json.loads((run / "result.json").read_text())


def warnings_of(run: Path) -> list[str]:
    lines = (run / "warnings.jsonl").read_text().splitlines()
    return [json.loads(line)["message"] for line in lines if "stdout" in line or "stderr" in line]


def in_shell(folder: Path, args: tuple[str, ...], redirection: str, **environ: str) -> "subprocess.CompletedProcess":
    """Run the program as users start it, with a shell's `redirection` of its streams."""
    command = shlex.join([sys.executable, "-P", "-m", "paceline", *args])
    return subprocess.run(
        ["bash", "-c", f"{command} {redirection}"],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        timeout=LIMIT_S,
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_completes_if_its_output_cannot_be_written(forking, tmp_path: Path, num_ranks: int) -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - no file of ours
        args = ["-m", "paceline", *ARGS, "--ranks", str(num_ranks)]
        process = forking.start(args, tmp_path, {}, terminal=full.fileno())
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert result_of(tmp_path / "run")["status"] == "completed"
    assert any("stdout: cannot be written: No space left on device" in line for line in warnings_of(tmp_path / "run"))


@pytest.mark.parametrize("closed", [pytest.param("2>&-", marks=pytest.mark.long), "<&- >&- 2>&-"])
def test_a_run_completes_without_standard_streams(tmp_path: Path, closed: str) -> None:
    completed = in_shell(tmp_path, ARGS, closed)
    assert completed.returncode == 0, completed.stderr
    assert result_of(tmp_path / "run")["status"] == "completed"
    warned = " ".join(warnings_of(tmp_path / "run"))
    assert ("stdout: cannot be written: it is closed" in warned) == (" >&-" in f" {closed}")
    assert ("stderr: cannot be written: it is closed" in warned) == ("2>&-" in closed)


def test_a_run_completes_after_the_reader_of_its_output_exits(paceline, tmp_path: Path) -> None:
    process = paceline.start(*ARGS)
    process.stdout.close()
    _, output = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert result_of(tmp_path / "run")["status"] == "completed"
    assert any("stdout: cannot be written: Broken pipe" in line for line in warnings_of(tmp_path / "run"))


@pytest.mark.parametrize("hangs_up", [False, True], ids=["SIGHUP ignored", "SIGHUP"])
def test_a_closed_terminal_does_not_end_a_run_by_itself(forking, tmp_path: Path, hangs_up: bool) -> None:
    """Only SIGHUP ends the run, with a checkpoint and exit code 75, like any other stop signal."""
    ours, theirs = pty.openpty()
    steps = "train.steps=4000" if hangs_up else "train.steps=60"
    process = forking.start(["-m", "paceline", *ARGS, steps], tmp_path, {"TERM": "xterm"}, terminal=theirs)
    os.close(theirs)
    rows, deadline = tmp_path / "run" / "steps.jsonl", time.monotonic() + LIMIT_S
    os.set_blocking(ours, False)
    while not (rows.exists() and rows.stat().st_size):
        with contextlib.suppress(BlockingIOError):
            os.read(ours, 1 << 16)
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.close(ours)
    if hangs_up:
        process.send_signal(signal.SIGHUP)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == (75 if hangs_up else 0)
    result = result_of(tmp_path / "run")
    assert result["status"] == ("preempted" if hangs_up else "completed")
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert newest.name == f"step-{result['steps']:08d}"
    assert any("cannot be written: Input/output error" in line for line in warnings_of(tmp_path / "run"))


def test_names_that_the_console_cannot_encode_are_escaped(tmp_path: Path) -> None:
    args = tuple("r\u00e9\U0001f600" if word == "run" else word for word in ARGS)
    completed = in_shell(tmp_path, args, "", PYTHONIOENCODING="ascii")
    assert completed.returncode == 0, completed.stderr
    assert b"r\\xe9\\U0001f600" in completed.stdout


def test_unwritable_json_is_an_error_after_a_complete_run(tmp_path: Path) -> None:
    completed = in_shell(tmp_path, (*ARGS, "--json"), "> /dev/full")
    errors = [line for line in completed.stderr.decode().splitlines() if line.startswith("error: ")]
    assert completed.returncode == 1 and b"Traceback" not in completed.stderr
    assert len(errors) == 1 and "stdout: cannot be written: No space left on device" in errors[0]
    assert result_of(tmp_path / "run")["status"] == "completed"


@pytest.mark.parametrize(
    ("redirection", "output"),
    [
        ("> /dev/full", "error: stdout: cannot be written: No space left on device"),
        (">&-", "error: stdout: cannot be written: Bad file descriptor"),
        ("| true; exit ${PIPESTATUS[0]}", ""),
    ],
)
def test_a_verb_fails_if_its_output_cannot_be_written(tmp_path: Path, redirection: str, output: str) -> None:
    """The verb prints one error line, or nothing if the reader of its output has exited."""
    completed = in_shell(tmp_path, ("recipes", "--schema"), redirection)
    assert completed.returncode == 1
    lines = completed.stderr.decode().splitlines()
    assert lines == [] if not output else (len(lines) == 1 and lines[0].startswith(output)), lines


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "is empty"),
        ("x" * 300, "too long"),
        ("/".join(["x" * 200] * 20), "too long"),
        (os.fsdecode(b"bad\xff"), "is not UTF-8"),
    ],
    ids=["empty", "long name", "long path", "no UTF-8"],
)
def test_an_invalid_run_directory_is_refused(paceline, name: str, why: str) -> None:
    paceline("train", "digits", "--run-dir", name).assert_error("--run-dir", why)


def test_a_too_long_run_name_is_reported_in_one_line(paceline) -> None:
    paceline("report", "x" * 300).assert_error("File name too long")
