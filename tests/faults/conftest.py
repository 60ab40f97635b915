"""What the tests of faults share: ranks that start at once, and what must be left of a run, and what must not."""

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
    """A run of forked ranks that has ended: the exit code of each, and what the first and all of them said."""

    codes: list[int]
    out: str
    errors: list[str]

    @property
    def result(self) -> dict:
        """The JSON that rank 0 printed, of a run that succeeded."""
        assert set(self.codes) == {0}, (self.codes, self.errors)
        return json.loads(self.out)


@dataclass(frozen=True)
class Ranks:
    """The program on any number of ranks, as the local launcher starts them, but each on its own."""

    python: Any
    folder: Path

    def __call__(self, *args: str, ranks: int = 1, absent: Sequence[int] = (), **environ: str) -> Forked:
        """Run `paceline WORDS` as `ranks` processes in `folder`, to its end, but for those that are absent.

        `environ` may say that one of them is another rank.
        """
        if "WORLD_SIZE" not in environ:
            args = (args[0], "--ranks", str(ranks), *args[1:])
        there = [rank for rank in range(ranks) if rank not in absent]
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(64)
            processes = [self._start(args, rank, ranks, listener, environ) for rank in there]
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
    """Return a function from a folder to the program, on ranks that start at once and work there."""
    return lambda folder: Ranks(forking, folder)


@pytest.fixture
def ranks(ranks_in: Callable[[Path], Ranks], tmp_path: Path) -> Ranks:
    """Return the program, on ranks that start at once; they work in the test's own folder."""
    return ranks_in(tmp_path)


@pytest.fixture
def family_of() -> Callable[[Path], list[psutil.Process]]:
    """Return a function from a run directory to the processes that work for it: those that name it, or are at it."""

    def found(run: Path) -> list[psutil.Process]:
        text = str(run.resolve())
        return [
            process for process in psutil.process_iter() if process.pid != os.getpid() and _works_for(process, text)
        ]

    return found


def _works_for(process: psutil.Process, run: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        named = [*process.cmdline(), *process.environ().values()]
        folder = process.cwd()  # of a program under test, the one that its run is in
        return (
            any(run in word for word in named) or folder == str(Path(run).parent) or f"{folder}/".startswith(f"{run}/")
        )
    except (psutil.Error, OSError):  # gone, or somebody else's
        return False


@pytest.fixture
def clean(family_of) -> Callable[[Path], None]:
    """Return a function that asserts that nothing is left of a run but its files.

    Name the run directory, or the folder it is in where the run was started there under a relative name: no process
    may work for it within `within_s`, so that none listens on a port, and nothing half written may lie in it.
    """

    def check(run: Path, within_s: float = 0.0) -> None:
        _, alive = psutil.wait_procs(family_of(run), timeout=within_s)
        assert not [(process.pid, process.cmdline()) for process in alive if process.is_running()]
        assert not family_of(run)
        assert not sorted(path for path in run.rglob("*.tmp*"))

    return check
