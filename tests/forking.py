"""Start Python programs at once: be a Python that has imported torch, and fork one after another.

What is forked is as `python -m MODULE WORDS` or `python SCRIPT WORDS` is when it has started: its own environment,
folder, signals and streams, and nothing else open. Ranks that `paceline` launches are forked from it in turn, as its
children, in sessions of their own. Not as after a start: modules are there, the hash seed is the same for all, and
`/proc` tells the command and the environment of this process.

`python forking.py FD`: a request comes over the socket FD as JSON, with the files that become 0, 1, 2 and 3, and its
answer goes back. `{"words": WORDS, "environ": E, "folder": F}` is answered by a process id, `{"code_of": ID}` by the
exit code, or null while the process runs.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import NoReturn

# What trainings import sooner or later; not `paceline.cli`, which reads the time when it is imported.
MODULES = ("paceline.train.run", "paceline.parallel.launch", "torch._dynamo", "torch.distributed.fsdp", "typer")
WHERE_INSTALLED = ("sklearn.datasets", "torch.utils.tensorboard", "torchvision.transforms.v2")
LARGEST_REQUEST = 1 << 17
FIRST_SPARE_FILE = 512


def serve(calls: socket.socket) -> None:
    """Answer requests until nobody is there to make them."""
    codes: dict[int, int] = {}

    def reap(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])

    signal.signal(signal.SIGCHLD, reap)
    while True:
        message, files, _, _ = socket.recv_fds(calls, LARGEST_REQUEST, 4)
        if not message:
            return
        request = json.loads(message)
        if "code_of" in request:
            answer = codes.get(request["code_of"])
        else:
            answer = fork(request["words"], request["environ"], dict(enumerate(files)), folder=request["folder"])
            for file in files:
                os.close(file)
        calls.send(json.dumps(answer).encode())


def fork(
    words: Sequence[str],
    environ: Mapping[str, str],
    files: Mapping[int, int],
    *,
    folder: str = os.curdir,
    in_session: bool = False,
) -> int:
    """Start a program whose files are `files`, by the number each is to have; return its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    try:
        if in_session:
            os.setsid()
        os.chdir(folder)
        be_as_started(environ, files)
        run(words)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)  # never back into what has forked


def be_as_started(environ: Mapping[str, str], files: Mapping[int, int]) -> None:
    """Leave this process what it would have after a start, and nothing else of what it had."""
    spare = {number: fcntl.fcntl(file, fcntl.F_DUPFD, FIRST_SPARE_FILE) for number, file in files.items()}
    for number, file in spare.items():
        os.dup2(file, number)
    first = 0
    for number in (*sorted(files), 1 << 16):
        if first < number:  # an empty range would be every file
            os.closerange(first, number)
        first = number + 1
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environ)


def run(words: Sequence[str]) -> NoReturn:
    """Run what follows `python` on a command line, and end as it does."""
    importlib.import_module("paceline.parallel.launch").subprocess = SimpleNamespace(Popen=Rank, DEVNULL=-3)
    is_safe = words[0] == "-P"  # else modules may be in the current folder, or beside the script
    is_module = words[is_safe] == "-m"
    sys.argv = list(words[is_safe + is_module :])
    sys.path[:1] = [] if is_safe else [os.curdir if is_module else str(Path(sys.argv[0]).parent)]
    code: int | str | None = 0
    try:
        start = runpy.run_module if is_module else runpy.run_path
        start(sys.argv[0], run_name="__main__", **({"alter_sys": True} if is_module else {}))
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if isinstance(code, str) else code or 0)


class Rank:
    """A rank that is forked from its launcher: what the launcher uses of `subprocess.Popen`."""

    def __init__(
        self, command: list[str], *, env: dict[str, str], pass_fds: Sequence[int], stdin: int, start_new_session: bool
    ) -> None:
        assert command[0] == sys.executable and start_new_session
        nothing = os.open(os.devnull, os.O_RDONLY)
        files = {0: nothing, 1: 1, 2: 2, **{number: number for number in pass_fds}}
        self.pid = fork(command[1:], env, files, in_session=True)
        os.close(nothing)
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or nothing while the rank runs."""
        return self._ended(os.WNOHANG)

    def wait(self) -> int | None:
        """Return the exit code, once there is one."""
        return self._ended(0)

    def send_signal(self, number: int) -> None:
        """Send the rank a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the rank at once."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name)
    for name in WHERE_INSTALLED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.freeze()  # what is there now is shared, as long as nobody counts its references
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.send(json.dumps(len(list(Path("/proc/self/task").iterdir()))).encode())
        serve(connection)
    os._exit(0)  # whoever forked this has no use for what libraries say at their end
