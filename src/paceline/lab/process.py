"""Start and terminate child processes."""

import contextlib
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Final

from paceline.core.process import die_with_parent_command

_TERMINATE_GRACE_S: Final = 10.0


ProcessStarter = Callable[[Sequence[str]], "subprocess.Popen[str]"]


def start_process(command: Sequence[str], orphaned: int = signal.SIGKILL) -> "subprocess.Popen[str]":
    """Start `command` in a new session. It gets the signal `orphaned` when this process ends."""
    return subprocess.Popen(
        die_with_parent_command(command, orphaned),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Ctrl-C of the terminal reaches the child through this process only.
        start_new_session=True,
    )


def terminate_process(process: "subprocess.Popen[str]") -> None:
    """Terminate a running process and its ranks: kill it after 10 seconds, or at once at a second Ctrl-C."""
    if process.poll() is not None:
        return
    # SIGTERM first: `paceline train` ends its ranks by itself.
    process.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_TERMINATE_GRACE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def extract_error(stderr: str, code: int) -> str:
    """Return the first `error:` line of `stderr`, else its last line, else how the process ended."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors:
        return errors[0]
    if code < 0:
        return f"was killed by signal {-code}"
    return lines[-1] if lines else f"ended with exit code {code}"
