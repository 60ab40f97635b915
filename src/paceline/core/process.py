"""End processes with their parent, ignore stop signals, and read process trees and CPU times from /proc.

As a program, `process.py PARENT SIGNAL COMMAND...` sets its parent-death signal and executes COMMAND (see
`die_with_parent_command`), so it imports nothing of paceline.
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

    Call it first in a forked process, and fork from a thread that stays alive: the kernel treats that thread as the
    parent.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # the parent ended before the request
        os._exit(1)


def die_with_parent_command(command: Sequence[str], number: int = signal.SIGKILL) -> list[str]:
    """Return a command that runs `command` as a child which receives signal `number` when this process ends."""
    if not sys.platform.startswith("linux"):
        return list(command)
    # Not preexec_fn, which is unsafe with threads: the request survives exec, so a small program can make it.
    # -I: modules beside this file or on PYTHONPATH must not shadow the standard library. -S: faster without site.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(number)), *command]


def descendants(pid: int, proc: Path = PROC) -> list[int]:
    """Return the ids of all processes below `pid`; none if the kernel does not list children."""
    found: list[int] = []
    for thread in tasks(pid, proc):
        for child in map(int, read_text_or_empty(f"{proc}/{pid}/task/{thread}/children").split()):
            found += [child, *descendants(child, proc)]
    return found


def tasks(pid: int, proc: Path = PROC) -> list[int]:
    """Return the thread ids of a process; none if it has ended."""
    try:
        return [int(task.name) for task in (proc / str(pid) / "task").iterdir()]
    except OSError:
        return []


def cpu_ticks(pid: int, proc: Path = PROC) -> int:
    """Return the CPU ticks (SC_CLK_TCK) of a process and its ended children; 0 if it has ended."""
    # proc(5): utime, stime, cutime and cstime are fields 14 to 17. Field 2, in parentheses, may contain spaces.
    fields = read_text_or_empty(proc / str(pid) / "stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))


def read_text_or_empty(path: Path | str) -> str:
    """Return the text of a file, or "" if it cannot be read, as the process may have ended."""
    try:
        with open(path) as file:  # noqa: PTH123 - creating a Path takes as long as reading
            return file.read()
    except OSError:
        return ""


def _exec_with_parent(parent: str, number: str, *command: str) -> None:
    die_with_parent(int(parent), int(number))
    # Python ignores these signals, and exec would keep that; `subprocess` restores them in the same way.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    os.execvp(command[0], command)  # noqa: S606 - no shell


if __name__ == "__main__":
    _exec_with_parent(*sys.argv[1:])
