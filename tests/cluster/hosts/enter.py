"""Run a program on a test machine: join its namespaces, then start the program like `forking.py` does.

`enter.py PID ARGS`, itself started by `forking.py`: PID is the machine's first process, seen from outside, and ARGS
follow `python` on a command line. The ranks of torchrun's agent are forked too, like those of paceline's launcher.
"""

import ctypes
import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from paceline.core.process import die_with_parent

KINDS = ("net", "uts", "pid", "mnt")
AGENT = "torch.distributed.run"
HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"


def enter(pid: int) -> None:
    """Join the namespaces of process `pid`, in the same folder; the PID namespace applies to later forks."""
    folder = Path.cwd()
    doors = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in KINDS]
    library = ctypes.CDLL(None, use_errno=True)
    for door in doors:
        if library.setns(door, 0):
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
        os.close(door)
    os.chdir(folder)


def run(args: Sequence[str]) -> NoReturn:
    """Run the arguments that follow `python` on a command line in a process of the machine, and exit with its code."""
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    die_with_parent(0)  # this process is on no machine
    forking = load_forking()
    if AGENT in args:
        importlib.import_module(HANDLER).Popen = lambda **how: Rank(forking, **how)
    forking.run(args)


def load_forking() -> ModuleType:
    """Return the module `forking.py`."""
    path = Path(__file__).parents[2] / "forking.py"
    spec = importlib.util.spec_from_file_location("forking", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Rank:
    """A rank forked from torchrun's agent, with the part of `subprocess.Popen`'s interface that the agent uses."""

    def __init__(
        self,
        forking: ModuleType,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: None,
        stderr: None,
        start_new_session: bool,
    ) -> None:
        python, unbuffered, *script_args = args
        assert unbuffered == "-u" and stdout is stderr is None
        self._rank = forking.Forked(
            [python, *script_args], env=env, pass_fds=(), stdin=subprocess.DEVNULL, start_new_session=start_new_session
        )
        self.pid = self._rank.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while the rank runs."""
        return self._rank.poll()

    def wait(self, timeout: float) -> int:
        """Return the exit code after the rank ends, or raise `subprocess.TimeoutExpired`."""
        return self._rank.wait(timeout)


if __name__ == "__main__":
    enter(int(sys.argv[1]))
    run(sys.argv[2:])
