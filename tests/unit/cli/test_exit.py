"""The program ends with its exit code, whatever threads still run and whoever reads its output."""

import signal
import time
from pathlib import Path

import pytest

WAIT_S = 30.0

LEAVING = """
import atexit, threading
from paceline.cli import exit_process
{left}
exit_process({code}, 0.05)
"""
THREAD = "threading.Thread(target=threading.Event().wait).start()"
AT_EXIT = """
threading.Thread(target=threading.Event().wait, daemon=True).start()
atexit.register(threading.Event().wait)
"""

LATE = """
import atexit, sys, time
from pathlib import Path
from paceline.cli import main
atexit.register(lambda: (Path("ending").touch(), time.sleep(1)))
sys.argv = ["paceline", "--version"]
main()
"""
CLOSED = """
import os, sys
from paceline.cli import main
read, write = os.pipe()
os.close(read)
sys.stdout = open(write, "w")  # which holds back, whatever the environment says
sys.argv = ["paceline", "--complete", "tra"]
main()
"""
REFUSED = """
import sys
import paceline.cli
from paceline.core.errors import RecipeError
def verb(standalone_mode):
    print("a line that is held back to the end")
    raise RecipeError("x: 1 is refused (write 2)")
paceline.cli.program_for = lambda args: verb
sys.stdout = open("/dev/full", "w")
paceline.cli.main()
"""


@pytest.mark.parametrize("left", [THREAD, AT_EXIT], ids=["a thread without an end", "a call at exit without an end"])
@pytest.mark.parametrize("code", [0, 75])
def test_a_thread_without_end_is_abandoned_with_the_verbs_code(forking, tmp_path: Path, left: str, code: int) -> None:
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING.format(left=left, code=code))
    process = forking.start([str(script)], tmp_path, {})
    process.communicate(timeout=WAIT_S)
    assert process.returncode == code


def test_a_thread_that_ends_in_time_is_awaited(forking, tmp_path: Path) -> None:
    script = tmp_path / "leaving.py"
    script.write_text(
        "import threading\nfrom pathlib import Path\nfrom paceline.cli import exit_process\n"
        "go = threading.Event()\n"
        "threading.Thread(target=lambda: (go.wait(), Path('ended').touch())).start()\n"
        "go.set()\nexit_process(0)\n"
    )
    process = forking.start([str(script)], tmp_path, {})
    process.communicate(timeout=WAIT_S)
    assert (process.returncode, (tmp_path / "ended").exists()) == (0, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_comes_while_a_verb_that_is_done_ends_changes_nothing(forking, tmp_path: Path, number) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE)
    process = forking.start([str(script)], tmp_path, {})
    deadline = time.monotonic() + WAIT_S
    while not (tmp_path / "ending").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 0


def test_a_closed_pipe_prints_no_error(forking, tmp_path: Path) -> None:
    script = tmp_path / "closed.py"
    script.write_text(CLOSED)
    process = forking.start([str(script)], tmp_path, {})
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (1, "")


def test_a_failed_verb_keeps_its_code_if_output_is_lost_too(forking, tmp_path: Path) -> None:
    script = tmp_path / "refused.py"
    script.write_text(REFUSED)
    process = forking.start([str(script)], tmp_path, {})
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (2, "error: x: 1 is refused (write 2)\n")
