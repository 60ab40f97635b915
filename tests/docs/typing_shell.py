"""A real bash for a page's commands, in which `paceline`, `python` and `torchrun` are forked and start without delay.

Each of the three is a short program that sends its arguments, environment and files to the server of
`tests/forking.py`, waits, and exits with the code of the forked process; so do the runs that `paceline` and `torchrun`
start in turn. Programs with unmet requirements do nothing.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from .commands import PROGRAMS, Mark, typed_words

MODULES = {"paceline": "paceline", "torchrun": "torch.distributed.run"}
AT_ONCE = Path(__file__).with_name("at_once.py")
NO_MARK = Mark()
CORES = os.sched_getaffinity(0)
POLL_S = 0.005
LIMIT_S = 240
STARTER = """\
#!{python} -ISs
import json, os, socket, sys
call = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
call.connect({place!r})
args = [*{prefix!r}, *(arg for arg in sys.argv[1:] if arg != "-u")]
request = dict(args=args, environ=dict(os.environ), folder=os.getcwd())
socket.send_fds(call, [json.dumps(request).encode()], [0, 1, 2])
sys.exit(int(call.recv(16)))
"""


@dataclass
class TypingShell:
    """Types blocks; `typed` has the arguments of every program that the last block started."""

    bin: Path
    listener: socket.socket
    forking: Any
    mark: Mark = NO_MARK
    typed: list[list[str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: set[int] = field(default_factory=set)
    cores: Iterator[int] = field(default_factory=lambda: cycle(own_cores()))

    def types(
        self, text: str, folder: Path, environ: Mapping[str, str], mark: Mark = NO_MARK
    ) -> "subprocess.CompletedProcess[str]":
        """Run `text` in a bash that stops at the first failure, in `folder`; return exit code and output."""
        self.mark, self.typed = mark, []
        command = ["bash", "-e", "-o", "pipefail", "-c", text]
        path = f"{self.bin}{os.pathsep}{environ['PATH']}"
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            out, _ = process.communicate(timeout=LIMIT_S)
        finally:
            self._end(process)
        return subprocess.CompletedProcess(command, process.returncode, out)

    def serve(self) -> None:
        """Start programs for those in `bin`, until the listener is closed."""
        while True:
            try:
                call, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=[call], daemon=True).start()

    def _answer(self, call: socket.socket) -> None:
        with call:
            message, files, _, _ = socket.recv_fds(call, 1 << 17, 3)
            request = json.loads(message)
            is_typed = "STARTED_IN_TURN" not in request["environ"]
            if is_typed:
                self.typed.append(request["args"])
                request["args"] = typed_words(request["args"], self.mark)
            if request["args"][:1] == ["-c"]:
                request["args"][:2] = [str(self._program(request["args"][1]))]
            with self.lock:
                pid = self.forking._request(request, files)
                self.running.add(pid)
                # One core and so one thread per program: threads of several programs on one core wait for one another.
                with suppress(ProcessLookupError):  # it has ended already
                    is_ladder = is_typed and "ladder" in request["args"]  # the ladder skips ranks without a core
                    os.sched_setaffinity(pid, CORES if is_ladder else {next(self.cores)})
            for file in files:
                os.close(file)
            while (code := self._code_of(pid)) is None:
                time.sleep(POLL_S)
            self.running.discard(pid)
            with suppress(BrokenPipeError):  # the client has been killed
                call.send(str(code if code >= 0 else 128 - code).encode())

    def _program(self, text: str) -> Path:
        """Write a program given as text to a file, and return it."""
        path = self.bin.parent / f"program_{len(self.typed)}.py"
        path.write_text(text)
        return path

    def _code_of(self, pid: int) -> int | None:
        with self.lock:
            return self.forking._request({"code_of": pid}, [])

    def _end(self, process: "subprocess.Popen[str]") -> None:
        for pid in [*self.running]:
            if self._code_of(pid) is None:
                os.kill(pid, signal.SIGKILL)
        if process.poll() is None:
            process.kill()
            process.wait()


def own_cores() -> list[int]:
    """Return the cores for programs of this process: all, or its share under pytest-xdist."""
    cores = sorted(os.sched_getaffinity(0))
    number, processes = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    return cores[int(number.removeprefix("gw")) % len(cores) :: int(processes)]


@contextmanager
def open_shell(forking: Any, folder: Path) -> Iterator[TypingShell]:
    """Return a shell whose programs are in `folder`, which must have a short path, because sockets require that."""
    place, bin = folder / "calls", folder / "bin"
    bin.mkdir()
    started = {name: [str(AT_ONCE), str(bin / "python"), module] for name, module in MODULES.items()}
    for name, words in {"python": [], **started}.items():
        _write(bin / name, STARTER.format(python=sys.executable, place=str(place), prefix=words))
    for name in PROGRAMS:
        _write(bin / name, "#!/bin/sh\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(place))
        listener.listen()
        shell = TypingShell(bin, listener, forking)
        thread = threading.Thread(target=shell.serve, daemon=True)
        thread.start()
        yield shell
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(timeout=10)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
