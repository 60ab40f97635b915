"""Run a command with the observer in its Python processes, forward signals to it, and return its exit code. Torch-free.

The command keeps the terminal and the process group, so it may read from the terminal, and Ctrl-C reaches it directly.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Final

from paceline.core.errors import PacelineError
from paceline.core.process import die_with_parent_command

WATCH_DIR: Final = "PACELINE_WATCH_DIR"
"""Variable with the folder for records, without which the observer does nothing."""
WATCH_LOSSES: Final = "PACELINE_WATCH_LOSSES"
"""Variable with which the records have the loss of each step."""
WATCH_PATCHES: Final = "PACELINE_WATCH_PATCHES"
"""Variable with changes of the script, as JSON: values by the name of a patch."""
_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SI_KERNEL: Final = 0x80  # siginfo.h: sent by the kernel, as by a terminal for Ctrl-C
_POLL_S: Final = 0.2


def find_program(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the path of the program of `command`. Raise `PacelineError` if there is none."""
    name = command[0]
    path = shutil.which(name, path=environ.get("PATH"))
    if path is None:
        is_script = name.endswith(".py") and Path(name).is_file()
        fix = f"put python or torchrun before it: -- python {name}" if is_script else "name one, such as python"
        raise PacelineError(f"watch: {name} is not a program ({fix})")
    if _lacks_interpreter(path):
        raise PacelineError(f"watch: {name} has no #! line (put its interpreter before it: -- sh {name})")
    return path


def _lacks_interpreter(path: str) -> bool:
    """Return whether a program is a text without `#!`: a shell would run it itself, the kernel does not."""
    try:
        with Path(path).open("rb") as file:
            start = file.read(256)
    except OSError:  # it may be executed and not be read
        return False
    return not start.startswith(b"#!") and b"\0" not in start


def observed_environ(environ: Mapping[str, str], records: Path) -> dict[str, str]:
    """Return `environ` with which Python processes load the observer, which writes to the folder `records`."""
    # A sitecustomize that this one hides is run by it.
    inject = str(resources.files("paceline.watch") / "inject")
    given = environ.get("PYTHONPATH")
    paths = [inject, *(given.split(os.pathsep) if given else [])]  # an empty path in it is the current folder
    return {**environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), WATCH_DIR: str(records.resolve())}


def run_command(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    stdout: int | None = None,
    on_wait: Callable[[], None] = lambda: None,
) -> int:
    """Run `command` until it ends, and return its exit code: 128 plus the signal that killed it.

    `stdout` is a descriptor in place of this process's own; `on_wait` is called a few times a second. Stop signals are
    forwarded, except those that the terminal has sent to the command too. If this process is killed, the command gets
    SIGTERM.
    """
    program = [find_program(command, environ), *command[1:]]
    process = subprocess.Popen(die_with_parent_command(program, signal.SIGTERM), env=dict(environ), stdout=stdout)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_FORWARDED, signal.SIGCHLD))
    try:
        while process.poll() is None:
            _forward(process)
            on_wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        # Ctrl-C that came as the command ended must not end the summary.
        while signal.sigtimedwait(_FORWARDED, 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _forward(process: "subprocess.Popen[bytes]") -> None:
    """Wait for a signal for a moment, and forward it."""
    received = signal.sigtimedwait((*_FORWARDED, signal.SIGCHLD), _POLL_S)
    # If this process was stopped for longer than the time-out (Ctrl-Z, fg), Python returns a struct it never filled in.
    if received is None or received.si_signo not in _FORWARDED:
        return
    if received.si_signo in (signal.SIGINT, signal.SIGHUP) and received.si_code == _SI_KERNEL:
        return
    process.send_signal(received.si_signo)
