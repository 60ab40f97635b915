"""How processes end: not after the one that started them, and not otherwise than they meant to."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""What schedulers and terminals send to ask a run to stop."""


def ignore_stop_signals() -> None:
    """Ignore from now on what asks to stop: a process that has stopped is not to be killed before it can say so."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process `parent`, which started it, ends. Linux only; else nothing.

    The parent may be gone before the request is made, so its id is compared afterwards.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
