"""How the program ends: with its code, whatever a package has left running, and whoever reads what it says."""

from pathlib import Path

import pytest

WAIT_S = 30.0

LEAVING = """
import atexit, threading
from paceline.cli import leave
{left}
leave({code}, 0.05)
"""
THREAD = "threading.Thread(target=threading.Event().wait).start()"
AT_EXIT = """
threading.Thread(target=threading.Event().wait, daemon=True).start()
atexit.register(threading.Event().wait)
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


@pytest.mark.parametrize("left", [THREAD, AT_EXIT], ids=["a thread without an end", "a call at exit without an end"])
@pytest.mark.parametrize("code", [0, 75])
def test_what_has_no_end_is_left_behind_and_the_code_is_the_verbs_own(
    forking, tmp_path: Path, left: str, code: int
) -> None:
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING.format(left=left, code=code))
    process = forking.start([str(script)], tmp_path, {})
    process.communicate(timeout=WAIT_S)
    assert process.returncode == code


def test_what_ends_in_time_has_its_end(forking, tmp_path: Path) -> None:
    script = tmp_path / "leaving.py"
    script.write_text(
        "import threading\nfrom pathlib import Path\nfrom paceline.cli import leave\n"
        "go = threading.Event()\n"
        "threading.Thread(target=lambda: (go.wait(), Path('ended').touch())).start()\n"
        "go.set()\nleave(0)\n"
    )
    process = forking.start([str(script)], tmp_path, {})
    process.communicate(timeout=WAIT_S)
    assert (process.returncode, (tmp_path / "ended").exists()) == (0, True)


def test_where_nobody_reads_what_was_held_back_to_the_end_nothing_is_said(forking, tmp_path: Path) -> None:
    script = tmp_path / "closed.py"
    script.write_text(CLOSED)
    process = forking.start([str(script)], tmp_path, {})
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (1, "")
