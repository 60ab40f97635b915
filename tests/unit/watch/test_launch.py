"""A watched command keeps its exit code, its signals and its terminal, and ends with paceline."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.core.errors import PacelineError
from paceline.watch.launch import WATCH_DIR, find_program, observed_environ, run_command

WAIT_S = 20
RUN = "import os, sys; from paceline.watch.launch import run_command; sys.exit(run_command(sys.argv[1:], os.environ))"
LOOP = "echo ready; n=0; while [ $n -lt 100 ]; do sleep 0.1; n=$((n+1)); done"
COUNT = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
print("ready", flush=True)
received = [signal.sigtimedwait([signal.SIGINT], 1) for _ in range(2)]
print("got", sum(each is not None for each in received))
"""


def start(script: str, **options) -> "subprocess.Popen[bytes]":
    """Start a watched shell script, and return once it prints its first line."""
    command = [sys.executable, "-c", RUN, "sh", "-c", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, **options)
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_the_exit_code_is_that_of_the_command(script, code):
    assert run_command(["sh", "-c", script], os.environ) == code


def test_the_output_passes_through_or_goes_elsewhere(tmp_path, capfd):
    run_command(["sh", "-c", "echo out; echo err >&2"], os.environ)
    assert capfd.readouterr() == ("out\n", "err\n")
    run_command(["sh", "-c", "echo out; echo err >&2"], os.environ, stdout=2)
    assert capfd.readouterr() == ("", "out\nerr\n")


def test_something_is_done_while_the_command_runs():
    calls = []
    run_command(["sleep", "0.7"], os.environ, on_wait=lambda: calls.append(1))
    assert 1 <= len(calls) <= 10


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_forwarded(number):
    name = number.name.removeprefix("SIG")
    process = start(f"trap 'echo {name}; exit 5' {name}; {LOOP}")
    process.send_signal(number)
    assert process.communicate(timeout=WAIT_S)[0].decode().split() == [name]
    assert process.returncode == 5


def test_a_watch_that_was_stopped_and_continued_goes_on():
    process = start("echo ready; sleep 2; echo done; exit 5")
    for _ in range(3):
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)  # longer than it waits for a signal
        process.send_signal(signal.SIGCONT)
        time.sleep(0.05)
    assert process.communicate(timeout=WAIT_S)[0].decode().split() == ["done"]
    assert process.returncode == 5


def test_ctrl_c_reaches_the_command_once():
    """The terminal sends it to all processes in the foreground, so paceline must not send it again."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", RUN, sys.executable, "-c", COUNT])
    shown = b""
    while b"ready" not in shown:
        shown += os.read(terminal, 1000)
    time.sleep(0.3)  # until it waits: two signals that are pending together are one
    os.write(terminal, b"\x03")
    while True:
        try:
            shown += os.read(terminal, 1000)
        except OSError:  # the terminal is gone with its last process
            break
    assert os.waitpid(pid, 0)[1] == 0
    assert b"got 1" in shown


def test_the_command_is_asked_to_end_when_paceline_is_killed(tmp_path):
    ended = tmp_path / "ended"
    process = start(f"trap 'touch {ended}; exit' TERM; {LOOP}")
    process.kill()
    process.wait(WAIT_S)
    limit_s = time.monotonic() + WAIT_S
    while not ended.exists() and time.monotonic() < limit_s:
        time.sleep(0.02)
    assert ended.exists()
    process.stdout.close()


def test_python_finds_the_observer_first_and_all_else_as_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environ = observed_environ({"PYTHONPATH": "/a:/b", "HOME": "/root"}, Path("records"))
    first, *others = environ["PYTHONPATH"].split(":")
    assert first.endswith("/paceline/watch/inject")
    assert others == ["/a", "/b"]
    assert environ[WATCH_DIR] == str(tmp_path / "records")
    assert environ["HOME"] == "/root"
    again = observed_environ(environ, Path("records"))
    assert again == environ
    for nothing in ({}, {"PYTHONPATH": ""}):
        assert observed_environ(nothing, Path("records"))["PYTHONPATH"] == first  # not with "", the current folder
    kept = observed_environ({"PYTHONPATH": ":/a"}, Path("records"))["PYTHONPATH"]
    assert kept == f"{first}::/a"  # as after PYTHONPATH=$PYTHONPATH:/a


def test_what_is_no_program_is_refused_with_a_fix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_program(["sh"], os.environ) == find_program(["sh", "-c"], os.environ)
    with pytest.raises(PacelineError, match=r"nothing-like-this is not a program \(.*python"):
        find_program(["nothing-like-this"], os.environ)
    Path("train.py").touch()
    with pytest.raises(PacelineError, match=r"python train\.py"):
        find_program(["train.py"], os.environ)
    Path("run.sh").write_text("python train.py\n")
    Path("run.sh").chmod(0o755)
    with pytest.raises(PacelineError, match=r"#!.*sh \./run\.sh"):
        find_program(["./run.sh"], os.environ)
