"""`core.process`: a process ends with the one that started it, even when that one is killed outright."""

import os
import signal
import subprocess
import sys

import pytest

from paceline.core.process import die_with_parent_command

WAIT_S = 20.0
IS_LINUX = sys.platform.startswith("linux")

CHILD = """
import os, signal
from paceline.core.process import die_with_parent
die_with_parent(int(os.environ["TEST_PARENT"]))
print(os.getpid(), flush=True)
signal.pause()
"""

PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, "TEST_PARENT": str(os.getpid())})
child.wait()
"""


@pytest.mark.skipif(not IS_LINUX, reason="the kernel's parent-death signal is Linux's")
def test_a_child_is_gone_when_its_parent_is_killed():
    """Both hold the pipe open, so its end is reached when, and only when, both are gone."""
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            parent.kill()
            rest, _ = parent.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            os.kill(child, signal.SIGKILL)
            raise
    assert rest == ""
    assert parent.returncode == -signal.SIGKILL


@pytest.mark.skipif(not IS_LINUX, reason="the kernel's parent-death signal is Linux's")
def test_a_child_whose_parent_has_gone_already_ends_at_once():
    """No process has the id -1, so it stands for a parent that is no longer there."""
    finished = subprocess.run(
        [sys.executable, "-c", CHILD], env={**os.environ, "TEST_PARENT": "-1"}, capture_output=True, timeout=WAIT_S
    )
    assert (finished.returncode, finished.stdout) == (1, b"")


def test_where_there_is_no_such_signal_nothing_happens(monkeypatch):
    from paceline.core.process import die_with_parent

    monkeypatch.setattr(sys, "platform", "darwin")
    die_with_parent(-1)


TYING = """
import os, subprocess, sys
from paceline.core.process import die_with_parent_command
child = subprocess.Popen(die_with_parent_command(["sleep", "600"]), start_new_session=True)
while "sleep" not in open(f"/proc/{child.pid}/comm").read():
    pass
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.skipif(not IS_LINUX, reason="the kernel's parent-death signal is Linux's")
def test_any_program_in_any_session_is_gone_when_who_started_it_is_killed_even_when_it_is_stopped():
    """`sleep` runs no line of Python, and a stopped process no instruction at all."""
    with subprocess.Popen([sys.executable, "-c", TYING], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, signal.SIGSTOP)
        try:
            parent.kill()
            rest, _ = parent.communicate(timeout=WAIT_S)  # both hold the pipe open
        except subprocess.TimeoutExpired:
            os.kill(child, signal.SIGKILL)
            raise
    assert rest == "" and parent.returncode == -signal.SIGKILL


@pytest.mark.skipif(not IS_LINUX, reason="the kernel's parent-death signal is Linux's")
def test_a_program_whose_starter_has_gone_already_is_not_run():
    words = die_with_parent_command(["echo", "is run"])
    words[words.index(str(os.getpid()))] = "-1"  # which no process is
    finished = subprocess.run(words, capture_output=True, timeout=WAIT_S)
    assert (finished.returncode, finished.stdout) == (1, b"")


LOOKING = """
import os, signal, sys
print(os.read(int(sys.argv[1]), 9).decode(), os.environ["TEST_NAME"], signal.getsignal(signal.SIGUSR1), os.getppid())
"""


def test_a_program_gets_the_files_the_variables_and_the_parent_it_would_have_had():
    reading, writing = os.pipe()
    os.write(writing, b"something")
    command = die_with_parent_command([sys.executable, "-c", LOOKING, str(reading)])
    environ = {**os.environ, "TEST_NAME": "value"}
    done = subprocess.run(command, pass_fds=[reading], env=environ, capture_output=True, text=True, timeout=WAIT_S)
    os.close(reading)
    os.close(writing)
    assert done.stdout == f"something value {signal.SIG_DFL} {os.getpid()}\n", done.stderr


@pytest.mark.skipif(not IS_LINUX, reason="/proc tells of signals on Linux")
def test_a_program_ignores_no_signal_that_it_would_not_have_ignored():
    """Python ignores two, and what it becomes would too."""
    command = ["grep", "SigIgn", "/proc/self/status"]
    commands = (die_with_parent_command(command), command)
    tied, plain = (subprocess.run(each, capture_output=True, timeout=WAIT_S) for each in commands)
    assert tied.stdout == plain.stdout and tied.stdout.startswith(b"SigIgn")
