"""Run commands of a checkout, several at once, each forked from a process that has imported torch.

Importing torch takes 3 s in a new Python, and forking takes no time. Only other libraries are imported before the fork,
so this works with any layout of paceline's modules.
"""

import atexit
import contextlib
import importlib
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

LIBRARIES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torchvision.transforms.v2",
    "numpy",
    "PIL.Image",
    "pydantic",
    "rich.console",
    "rich.progress",
    "rich.table",
    "ruamel.yaml",
    "safetensors.torch",
    "scipy.optimize",
    "scipy.stats",
    "sklearn.datasets",
    "jinja2",
    "typer",
)
TIMEOUT_S = 400
POLL_S = 0.01


@dataclass(frozen=True)
class Job:
    """A command: `paceline ARGS`, or `python SCRIPT ARGS` if there is a script.

    With `ranks`, that many processes are started like torchrun does, and rank 0's output is used. `disturb` is called
    with the process id of the first repeatedly, until it returns True. `cores` is the number of cores it uses.
    """

    args: tuple[str, ...]
    ranks: int = 0
    script: str = ""
    stdin: str = os.devnull
    stdout: str = ""
    disturb: Callable[[int], bool] | None = None
    cores: int = 1


@dataclass(frozen=True)
class JobResult:
    """The result of a command: the exit code of each rank, and the output."""

    codes: list[int]
    out: str
    err: str


Case = Generator[Job, JobResult, None]
"""Yields the jobs of one case in order, and receives the result of each."""


def import_libraries() -> None:
    """Import the libraries that most commands need, if they are installed."""
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert not any(name.split(".")[0] == "paceline" for name in sys.modules)
    assert threading.active_count() == 1, "threads do not survive a fork"


def run_cases(cases: Iterable[Case], work: Path, cores: int) -> None:
    """Run all cases in the folder `work`, as many jobs at once as there are cores."""
    ready: list[tuple[Case, Job]] = [(case, next(case)) for case in cases]
    running: list[_Running] = []
    number = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that jobs are killed too
    try:
        while ready or running:
            free = cores - sum(each.cores for each in running)
            # In order, so that a job that needs two cores eventually gets them.
            while ready and (_cores_of(ready[0][1]) <= free or not running):
                case, job = ready.pop(0)
                number += 1
                running.append(_Running.start(case, job, work, work / f"output/{number}"))
                free -= _cores_of(job)
            time.sleep(POLL_S)
            for each in [each for each in running if each.is_over()]:
                running.remove(each)
                with contextlib.suppress(StopIteration):
                    ready.insert(0, (each.case, each.case.send(each.completed())))
    finally:
        for each in running:
            each.kill()


def _cores_of(job: Job) -> int:
    return max(job.cores, job.ranks)


@dataclass
class _Running:
    case: Case
    job: Job
    output: Path
    pids: list[int]
    codes: dict[int, int] = field(default_factory=dict)
    is_disturbed: bool = False
    deadline_s: float = 0.0

    @classmethod
    def start(cls, case: Case, job: Job, work: Path, output: Path) -> "_Running":
        output.parent.mkdir(exist_ok=True)
        environs = _rank_environs(job.ranks) or [{}]
        pids = [_fork(job, work, output, rank, environ) for rank, environ in enumerate(environs)]
        return cls(case, job, output, pids, deadline_s=time.monotonic() + TIMEOUT_S)

    @property
    def cores(self) -> int:
        return _cores_of(self.job)

    def is_over(self) -> bool:
        for pid in self.pids:
            if pid not in self.codes:
                completed, status = os.waitpid(pid, os.WNOHANG)
                if completed:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        if self.job.disturb and not self.is_disturbed and self.pids[0] not in self.codes:
            self.is_disturbed = self.job.disturb(self.pids[0])
        if time.monotonic() > self.deadline_s:
            self.kill()
        return len(self.codes) == len(self.pids)

    def completed(self) -> JobResult:
        out = Path(f"{self.output}.out").read_text(errors="replace") if not self.job.stdout else ""
        err = Path(f"{self.output}.err").read_text(errors="replace")
        return JobResult([self.codes[pid] for pid in self.pids], out, err)

    def kill(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _rank_environs(ranks: int) -> list[dict[str, str]]:
    if not ranks:
        return []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    return [
        {**shared, "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
        for rank in range(ranks)
    ]


def _fork(job: Job, work: Path, output: Path, rank: int, environ: dict[str, str]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(work)
        ending = "" if rank == 0 else f".{rank}"
        write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        files = (
            os.open(job.stdin, os.O_RDONLY),
            os.open(job.stdout or f"{output}.out{ending}", write),
            os.open(f"{output}.err{ending}", write),
        )
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, 1 << 16)
        os.environ.update(environ)
        _run(job)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)  # never return into the code that forked


def _run(job: Job) -> NoReturn:
    """Run a command line like Python does, and exit with its code."""
    sys.path[0] = str(Path(job.script).parent) if job.script else str(Path.cwd())
    sys.argv = [job.script or "paceline", *job.args]
    code: int | str | None = 0
    try:
        if job.script:
            runpy.run_path(job.script, run_name="__main__")
        else:
            runpy.run_module("paceline", run_name="__main__", alter_sys=True)
    except SystemExit as completed:
        code = completed.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if isinstance(code, str) else code or 0)
