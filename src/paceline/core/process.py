"""How processes start and end: not after the one that started them, and not otherwise than they meant to.

And by proc(5): which processes are below one, and the CPU time that they have used.

Run as a program, `process.py PARENT SIGNAL COMMAND...`, it ties itself to its parent and becomes COMMAND: see
`die_with_us_command`. So it imports nothing of paceline.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
_PR_SET_PDEATHSIG: Final = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals by which schedulers and terminals ask a run to stop."""


def ignore_stop_signals() -> None:
    """Ignore stop signals from now on, so that a stopped process can still report its result."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process signal `number` when process `parent` ends. Linux only.

    Call it first in a forked process. The parent may have ended before the request, so its id is compared afterwards.
    The kernel treats the forking thread as the parent: start processes from a thread that stays alive.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os._exit(1)


def die_with_us_command(command: Sequence[str], number: int = signal.SIGKILL) -> list[str]:
    """Return the command that starts `command` as a child which receives signal `number` when this process ends.

    The request to the kernel survives exec, so it holds before COMMAND runs, whatever COMMAND is and in whichever
    session.
    """
    if not sys.platform.startswith("linux"):
        return list(command)
    # -I: modules beside this file or on PYTHONPATH are not to stand in for Python's own. -S: site packages take time.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(number)), *command]


def descendants(pid: int, proc: Path = PROC) -> list[int]:
    """Return the processes below `pid`; none if the kernel does not list them."""
    found: list[int] = []
    for thread in tasks(pid, proc):
        for child in map(int, read_text_or_empty(f"{proc}/{pid}/task/{thread}/children").split()):
            found += [child, *descendants(child, proc)]
    return found


def tasks(pid: int, proc: Path = PROC) -> list[int]:
    """Return the thread ids of a process; none after it has ended."""
    try:
        return [int(task.name) for task in (proc / str(pid) / "task").iterdir()]
    except OSError:
        return []


def cpu_ticks(pid: int, proc: Path = PROC) -> int:
    """Return the CPU ticks (SC_CLK_TCK) of a process and its ended children, or 0.

    The sum of utime, stime, cutime and cstime, fields 14 to 17 of a line whose second field may contain spaces:
    proc(5).
    """
    fields = read_text_or_empty(proc / str(pid) / "stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))


def read_text_or_empty(path: Path | str) -> str:
    """Return the text of a file, or "" if it cannot be read: a process may end at any moment."""
    try:
        with open(path) as file:  # noqa: PTH123 - a Path for each of many threads takes as long as reading
            return file.read()
    except OSError:
        return ""


def _exec_tied(parent: str, number: str, *command: str) -> None:
    die_with_parent(int(parent), int(number))
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python itself; `subprocess` gives them back before exec too
        signal.signal(ignored, signal.SIG_DFL)
    os.execvp(command[0], command)  # noqa: S606  it is what we were started to become


if __name__ == "__main__":
    _exec_tied(*sys.argv[1:])
