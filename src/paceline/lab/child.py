"""A process that makes a trial, or says what one would be made on: how it is started and ended, and what it says."""

import contextlib
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from paceline.core.process import tied_to_us

_GRACE_S: Final = 10.0


class Process(Protocol):
    """What is used of `subprocess.Popen`, in text mode."""

    @property
    def returncode(self) -> int | None:
        """The exit code, negative where a signal ended the process; None while it runs."""
        ...

    def communicate(self, *, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Wait for the end; return what was written. Raise `subprocess.TimeoutExpired` after `timeout` seconds."""
        ...

    def poll(self) -> int | None:
        """Return the exit code where it has ended."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raise `subprocess.TimeoutExpired` after `timeout` seconds."""
        ...

    def terminate(self) -> None:
        """Ask it to end."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


Start = Callable[[Sequence[str]], Process]


def start_process(command: Sequence[str], orphaned: int = signal.SIGKILL) -> "subprocess.Popen[str]":
    """Start `command` in a session of its own, so that a Ctrl-C of the terminal reaches it through us alone.

    It gets the signal `orphaned` when this process ends, however it ends.
    """
    return subprocess.Popen(
        tied_to_us(command, orphaned),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def end(process: Process) -> None:
    """End a process that still runs, and its ranks with it: by force after a while, and at once at a second Ctrl-C."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def complaint(said: str, code: int) -> str:
    """Return the first error that a process named, else the last that it said, else how it ended."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if named:
        return named[0]
    if code < 0:
        return f"was killed by signal {-code}"
    return lines[-1] if lines else f"ended with exit code {code}"
