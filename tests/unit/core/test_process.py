"""`core.process`: a process ends with the one that started it, even when that one is killed outright."""

import os
import signal
import subprocess
import sys

import pytest

WAIT_S = 20.0

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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's parent-death signal is Linux's")
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's parent-death signal is Linux's")
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
