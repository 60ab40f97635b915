"""Hosts without a scheduler: links that are slow or cut, ranks started on each by hand, and torchrun's agents."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

NAMES = ("host1", "host2", "host3")
SWITCH = "switch"
ENTER = Path(__file__).with_name("enter.py")
PORT = 29400  # nobody else is on a host
PATIENCE_S = 100.0
POLL_S = 0.01


@dataclass(frozen=True)
class Completed:
    """What came of a program: its exit code, and the lines of errors that are paceline's own."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """The lines in which paceline explains itself."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


@dataclass(frozen=True)
class Hosts:
    """Hosts by name, each on a cable of its own to one switch. What runs on them works in `folder`, which all see."""

    machines: Any
    python: Any
    folder: Path

    def address(self, name: str) -> str:
        """Return the address of a host, which its name leads to on all of them."""
        return self.machines.address(name)

    def shape(self, rate: str, *names: str) -> None:
        """Let these hosts, or all, send no faster than `rate`."""
        for name in names or NAMES:
            bucket = ("tbf", "rate", rate, "burst", "64kb", "latency", "100ms")
            self.machines[name]("tc", "qdisc", "replace", "dev", "eth0", "root", *bucket)

    def cut(self, name: str) -> None:
        """Pull a host's cable out of the switch."""
        self.machines[SWITCH]("ip", "link", "set", name, "down")

    def restore(self, name: str) -> None:
        """Put it in again."""
        self.machines[SWITCH]("ip", "link", "set", name, "up")

    def lose(self, name: str) -> None:
        """End a host as a loss of power does: its cable is dead, and nothing on it has a last word."""
        self.machines.lose(name)

    def start(self, name: str, *args: str, **environ: str) -> Any:
        """Start `python WORDS` on a host."""
        entered = ["-P", str(ENTER), str(self.machines[name].pid), *args]
        return self.python.start(entered, self.folder, {"OMP_NUM_THREADS": "1", **environ})

    def by_hand(self, names: Sequence[str], *args: str, **environ: str) -> list[Any]:
        """Start `paceline WORDS` as a rank on each of these hosts, by the variables that say so."""
        meet = {"MASTER_ADDR": self.address(names[0]), "MASTER_PORT": str(PORT), "WORLD_SIZE": str(len(names))}
        one = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        command = ("-P", "-m", "paceline", *args)
        return [self.start(name, *command, RANK=str(rank), **meet, **one, **environ) for rank, name in enumerate(names)]

    def agent(self, name: str, *args: str, to: str, restarts: int = 0, **environ: str) -> Any:
        """Start torchrun on a host, for one rank of two hosts that meet at host `to`, and `paceline WORDS` by it."""
        meet = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={to}:{PORT}")
        # A host is lost after 3 s, and not after the 15 s that are torchrun's own.
        options = ("--rdzv-id=1", f"--max-restarts={restarts}", "--monitor-interval=0.1")
        conf = "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3"
        return self.start(
            name, "-m", "torch.distributed.run", *meet, *options, conf, "-m", "paceline", *args, **environ
        )

    def completed(self, *processes: Any, within_s: float = PATIENCE_S) -> list[Completed]:
        """Wait until these have ended; return what came of each."""
        deadline_s = time.monotonic() + within_s
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline_s:
                pytest.fail(f"it takes too long: {[stopped(process) for process in processes]}")
            time.sleep(POLL_S)
        return [stopped(process) for process in processes]

    def wait(self, is_there: Callable[[], object], *processes: Any, within_s: float = PATIENCE_S) -> None:
        """Wait until something is there, while these processes run."""
        deadline_s = time.monotonic() + within_s
        while not is_there():
            for process in processes:
                assert process.poll() is None, process.communicate(timeout=10)
            if time.monotonic() > deadline_s:
                pytest.fail(f"it takes too long: {[stopped(process) for process in processes]}")
            time.sleep(POLL_S)

    def busy(self, name: str) -> list[list[str]]:
        """Return the commands that still run on a host."""
        first = self.machines[name].pid
        home = namespace_of(first)
        return [each.cmdline() for each in psutil.process_iter() if each.pid != first and lives_in(each, home)]

    def rank_by(self, agent: Any) -> psutil.Process | None:
        """Return the process of the one rank that an agent has started, if it runs."""
        inside = [each for outer in psutil.Process(agent.pid).children() for each in outer.children()]
        return next((each for each in inside if is_alive(each)), None)


def stopped(process: Any) -> Completed:
    """Return what came of a process, which is ended where it has not ended yet."""
    process.kill()
    out, err = process.communicate(timeout=PATIENCE_S)
    return Completed(process.returncode, out, err)


def namespace_of(pid: int) -> str:
    """Return which processes process `pid` sees, in the kernel's words; nothing where it is gone."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def lives_in(process: psutil.Process, home: str) -> bool:
    return namespace_of(process.pid) == home != "" and is_alive(process)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that nobody has asked after since its end does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # gone in between
        return False


@pytest.fixture
def hosts(boot_machines, forking, tmp_path: Path) -> Iterator[Hosts]:
    """Return three hosts that have just been started, on links of 10 Gbit/s."""
    if shutil.which("tc") is None:
        pytest.skip("links are shaped by tc, which is not installed (apt-get install iproute2)")
    machines = boot_machines(SWITCH, *NAMES)
    made = Hosts(machines, forking, tmp_path)
    try:
        made.shape("10gbit")
        yield made
    finally:
        for name in reversed([*machines.up]):
            machines.end(name)


@pytest.fixture(scope="module")
def uninterrupted(paceline_in, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function from words and a number of ranks to a run on this machine that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")

    def run_on(ranks: int, *args: str) -> Path:
        run = folder / str(ranks)
        if not run.exists():
            paceline_in(folder)(*args, "--ranks", str(ranks), "--run-dir", str(run)).result  # noqa: B018
        return run

    return run_on


@pytest.fixture
def same(state_digest) -> Callable[[Path, Path], None]:
    """Return a function that asserts that two runs have seen the same samples and end with the same bits."""

    def check(run: Path, uninterrupted: Path) -> None:
        assert state_digest(run) == state_digest(uninterrupted)
        samples = sorted(path.name for path in uninterrupted.glob("steps.rank*.jsonl"))
        assert samples
        for name in samples:
            assert (run / name).read_text() == (uninterrupted / name).read_text()

    return check
