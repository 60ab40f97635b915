"""Fixtures of the fault tests: ranks from a fork server, and checks of what a run leaves behind."""

import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.core.world import World
from paceline.parallel.environ import rank_environ

LIMIT_S = 120


@dataclass(frozen=True)
class Forked:
    """The result of forked ranks: the exit code of each, the output of the first and the errors of all."""

    codes: list[int]
    out: str
    errors: list[str]

    @property
    def result(self) -> dict:
        """The JSON that rank 0 printed in a successful run."""
        assert set(self.codes) == {0}, (self.codes, self.errors)
        return json.loads(self.out)


@dataclass(frozen=True)
class Ranks:
    """The program on any number of ranks, with the local launcher's variables but without the launcher."""

    python: Any
    folder: Path

    def __call__(self, *args: str, ranks: int = 1, absent: Sequence[int] = (), **environ: str) -> Forked:
        """Run `paceline ARGS` as `ranks` processes in `folder` until they end, except those in `absent`.

        `environ` may override the rank of a process.
        """
        if "WORLD_SIZE" not in environ:
            args = (args[0], "--ranks", str(ranks), *args[1:])
        present = [rank for rank in range(ranks) if rank not in absent]
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(64)
            processes = [self._start(args, rank, ranks, listener, environ) for rank in present]
        output = []
        try:
            output = [process.communicate(timeout=LIMIT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        return Forked([process.returncode for process in processes], output[0][0], [err for _, err in output])

    def _start(self, args: tuple[str, ...], rank: int, ranks: int, listener: socket.socket, environ: dict) -> Any:
        port, server = listener.getsockname()[1], self.python.server.pid
        store_fd = 3 if rank == 0 else -1
        local = {"local_rank": rank, "local_world_size": ranks, "launcher": "local", "launcher_pid": server}
        world = World(rank=rank, world_size=ranks, master_port=port, store_fd=store_fd, **local)
        environ = rank_environ(environ, world) if ranks > 1 else environ
        hosts = {"listener": listener.fileno()} if rank == 0 else {}
        return self.python.start(["-P", "-m", "paceline", *args], self.folder, environ, **hosts)


@pytest.fixture(scope="session")
def ranks_in(forking) -> Callable[[Path], Ranks]:
    """Return a function from a folder to the program on ranks, which run there and start without delay."""
    return lambda folder: Ranks(forking, folder)


@pytest.fixture
def ranks(ranks_in: Callable[[Path], Ranks], tmp_path: Path) -> Ranks:
    """Return the program on ranks in the test's own folder; they start without delay."""
    return ranks_in(tmp_path)


@pytest.fixture
def family_of() -> Callable[[Path], list[psutil.Process]]:
    """Return a function from a run directory to the processes that work for it: they name it, or are in it."""

    def find(run: Path) -> list[psutil.Process]:
        text = str(run.resolve())
        return [
            process for process in psutil.process_iter() if process.pid != os.getpid() and _works_for(process, text)
        ]

    return find


def _works_for(process: psutil.Process, run: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        named = [*process.cmdline(), *process.environ().values()]
        folder = process.cwd()  # the run directory that a program under test works in
        return (
            any(run in word for word in named) or folder == str(Path(run).parent) or f"{folder}/".startswith(f"{run}/")
        )
    except (psutil.Error, OSError):  # the process has ended, or belongs to another user
        return False


@pytest.fixture
def clean(family_of) -> Callable[[Path], None]:
    """Return a function that asserts that a run leaves nothing but its files behind.

    It takes the run directory, or the folder that contains it if the run was started there under a relative name.
    Within `within_s` no process may work for the run, so that none listens on a port, and no partially written file may
    be left.
    """

    def check(run: Path, within_s: float = 0.0) -> None:
        _, alive = psutil.wait_procs(family_of(run), timeout=within_s)
        assert not [(process.pid, process.cmdline()) for process in alive if process.is_running()]
        assert not family_of(run)
        assert not sorted(path for path in run.rglob("*.tmp*"))

    return check
