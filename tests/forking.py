"""Fork server for tests: a Python that has imported torch and forks programs, so that they start without delay.

A forked program is in the state of a new `python -m MODULE ARGS` or `python SCRIPT ARGS`: its own environment, folder,
signals and streams, and no other open file. The ranks that `paceline` launches, and the runs that a profile or a ladder
measures, are forked from it in turn, as its children, in sessions of their own. Three things differ from a new
interpreter: modules are imported, their digest is taken and the templates of pages are compiled already; all programs
have the same hash seed; and `/proc` shows the command line and environment of the server.

`python forking.py FD`: a request arrives over the socket FD as JSON, with the files that become 0, 1, 2 and 3, and its
answer is sent back. `{"args": ARGS, "environ": E, "folder": F}` is answered with a process id, `{"code_of": ID}` with
the exit code, or null while the process runs.
"""

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import importlib
import json
import math
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

# Modules that runs import sooner or later. `paceline.cli` is excluded, because it reads the clock when it is imported.
MODULES = (
    "paceline.training.run",
    "paceline.training.eval_run",
    "paceline.parallel.launch",
    "paceline.lab.runner",
    "paceline.models.weights_recipe",
    "paceline.parallel.network_interface",
    "paceline.report.write",
    "paceline.report.render_terminal",
    "jinja2",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "typer",
)
STARTERS = ("paceline.parallel.launch", "paceline.lab.process")
WHERE_INSTALLED = ("sklearn.datasets", "timm", "torch.utils.tensorboard", "torchvision.transforms.v2")
FROM_ENVIRONMENT = "huggingface_hub.constants"  # imported by timm; reads its values from the environment
LARGEST_REQUEST = 1 << 17
FIRST_SPARE_FILE = 512
PYTHON = sys.executable
PRINT_STACKS = signal.SIGRTMAX  # prints the stack of each thread to standard error
POLL_S = 0.005
num_own = 1  # folders of the running program at the start of `sys.path`


def serve(calls: socket.socket) -> None:
    """Answer requests until the client closes its socket."""
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
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            answer = fork(request["args"], request["environ"], dict(enumerate(files)), folder=request["folder"])
            codes.pop(answer, None)  # of an earlier process with the same id
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            for file in files:
                os.close(file)
        calls.send(json.dumps(answer).encode())


def fork(
    args: Sequence[str],
    environ: Mapping[str, str],
    files: Mapping[int, int],
    *,
    folder: str = os.curdir,
    in_session: bool = False,
    tied: Sequence[int] = (),
) -> int:
    """Fork a program with `files`, a map from its descriptors to files of this process; return its process id.

    `tied` are the arguments of `die_with_parent`, for a program that must end with this process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    try:
        if tied:
            importlib.import_module("paceline.core.process").die_with_parent(*tied)
        if in_session:
            os.setsid()
        os.chdir(folder)
        be_as_started(environ, files)
        run(args)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)  # never return into the code that forked


def be_as_started(environ: Mapping[str, str], files: Mapping[int, int]) -> None:
    """Reset files, signals and environment to those of a new interpreter."""
    spare = {number: fcntl.fcntl(file, fcntl.F_DUPFD, FIRST_SPARE_FILE) for number, file in files.items()}
    for number, file in spare.items():
        os.dup2(file, number)
    first = 0
    for number in (*sorted(files), 1 << 16):
        if first < number:  # an empty range would close every file
            os.closerange(first, number)
        first = number + 1
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    faulthandler.register(PRINT_STACKS, 2)
    os.environ.clear()
    os.environ.update(environ)


def run(args: Sequence[str]) -> NoReturn:
    """Run the arguments that follow `python` on a command line, then exit with the program's code."""
    if list(args[:2]) == [
        "-I",
        "-S",
    ]:  # tied to the process that requested it (`die_with_parent_command`), which is not the parent
        args = args[6:]
    its_own = {"DEVNULL": DEVNULL, "PIPE": PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
    for name in STARTERS:
        importlib.import_module(name).subprocess = SimpleNamespace(Popen=popen, **its_own)
    for each in list(weakref.finalize._registry):
        each.atexit = False  # removes a temporary folder of the parent, say
    # The modules of the parent hold its state
    for name in [name for name in sys.modules if name.startswith("paceline.cli")]:
        del sys.modules[name]
    global num_own
    if constants := sys.modules.get(FROM_ENVIRONMENT):
        importlib.reload(constants)
    is_safe = args[0] == "-P"  # without -P, modules may be in the current folder or beside the script
    is_module = args[is_safe] == "-m"
    sys.argv = list(args[is_safe + is_module :])
    own = [] if is_safe else [os.curdir if is_module else str(Path(sys.argv[0]).parent)]
    options = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each not in sys.path]
    sys.path[:num_own] = [*own, *options]
    num_own = len(own)
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


def popen(command: list[str], **options: Any) -> "Forked | subprocess.Popen[str]":
    """Replace `subprocess.Popen` in launchers: fork commands of this Python, and start all others."""
    tie = importlib.import_module("paceline.core.process").die_with_parent_command(
        []
    )  # arguments, then a process id and a signal
    tied, args = ([], command) if command[: len(tie) - 2] != tie[:-2] else (command[: len(tie)], command[len(tie) :])
    if args[0] not in (PYTHON, sys.executable):
        return subprocess.Popen(command, **options)
    return Forked(args, **options, tied=[int(each) for each in tied[-2:]])


class Forked:
    """A program that a launcher forked, with the part of `subprocess.Popen`'s interface that launchers use."""

    def __init__(
        self,
        command: list[str],
        *,
        stdin: int,
        start_new_session: bool,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        stdout: int | None = None,
        stderr: int | None = None,
        text: bool = True,
        errors: str = "replace",
        tied: Sequence[int] = (),
    ) -> None:
        assert stdin == DEVNULL and start_new_session and text and errors == "replace"
        nothing = os.open(os.devnull, os.O_RDWR)
        files, self._pipes = {0: nothing, **{number: number for number in pass_fds}}, dict[int, int]()
        for number, stream in ((1, stdout), (2, stderr)):
            if stream == PIPE:
                self._pipes[number], files[number] = os.pipe()
            else:
                files[number] = {None: number, DEVNULL: nothing}[stream]
        self.pid = fork(command[1:], dict(os.environ) if env is None else env, files, in_session=True, tied=tied)
        self.returncode: int | None = None
        os.close(nothing)
        for number in self._pipes:
            os.close(files[number])

    def communicate(self, *, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Return what came from the pipes once all their writers have ended, or raise `subprocess.TimeoutExpired`."""
        limit_s = math.inf if timeout is None else time.monotonic() + timeout
        output = dict.fromkeys(self._pipes, b"")
        with selectors.DefaultSelector() as open_ones:
            for number, file in self._pipes.items():
                open_ones.register(file, selectors.EVENT_READ, number)
            while open_ones.get_map():
                left_s = limit_s - time.monotonic()
                if left_s < 0:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
                for key, _ in open_ones.select(None if timeout is None else left_s):
                    part = os.read(key.fd, 1 << 16)
                    output[key.data] += part
                    if not part:
                        open_ones.unregister(key.fd)
                        os.close(key.fd)
        self.wait(limit_s - time.monotonic())
        text = {number: part.decode(errors="replace") for number, part in output.items()}
        return text.get(1), text.get(2)

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """Return the exit code after the program ends, or raise `subprocess.TimeoutExpired`."""
        limit_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > limit_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send the program a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the program."""
        self.send_signal(signal.SIGKILL)


if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name)
    for name in WHERE_INSTALLED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    assert importlib.import_module("paceline").__version__  # a checkout runs git to compute it, once
    assert importlib.import_module("paceline.core.source_digest").source_digest()  # of the files imported above
    pages = importlib.import_module("paceline.report.render").page_template().environment
    for name in pages.list_templates(extensions=("j2", "css")):
        pages.get_template(name)  # compiles it, which takes as long as a short training
    gc.freeze()  # keeps the memory of imported modules shared, as their reference counts do not change
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.send(json.dumps(len(list(Path("/proc/self/task").iterdir()))).encode())
        serve(connection)
    os._exit(0)  # skips the exit handlers of libraries
