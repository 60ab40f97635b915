"""Hosts without a scheduler: slow or cut links, ranks started without a launcher, and torchrun agents."""

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
PORT = 29400  # no other load on a host
PATIENCE_S = 100.0
POLL_S = 0.01
KEEP_ALIVE_S = 15  # torchrun's default
NETWORK = "ip -statistics link show eth0; ip neighbor; ss --tcp --numeric --info --options; tc -statistics qdisc show"


@dataclass(frozen=True)
class Completed:
    """The exit code and output of a program, and its error lines from paceline."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """The error lines of paceline."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


@dataclass(frozen=True)
class Hosts:
    """Hosts by name, each connected to one switch. Programs on them run in `folder`, which all hosts share."""

    machines: Any
    python: Any
    folder: Path

    def address(self, name: str) -> str:
        """Return the address to which a host's name resolves on all hosts."""
        return self.machines.address(name)

    def shape(self, rate: str, *names: str) -> None:
        """Limit the sending rate of these hosts, or of all, to `rate`."""
        for name in names or NAMES:
            bucket = ("tbf", "rate", rate, "burst", "64kb", "latency", "100ms")
            self.machines[name]("tc", "qdisc", "replace", "dev", "eth0", "root", *bucket)

    def cut(self, name: str) -> None:
        """Disconnect a host from the switch."""
        self.machines[SWITCH]("ip", "link", "set", name, "down")

    def restore(self, name: str) -> None:
        """Reconnect a host."""
        self.machines[SWITCH]("ip", "link", "set", name, "up")

    def describe_network(self) -> str:
        """Return links, neighbors, TCP connections and queues of the hosts, for the message of a failed test."""
        return "\n".join(f"{name}: {self.machines[name].run('sh', '-c', NETWORK).stdout}" for name in NAMES)

    def lose(self, name: str) -> None:
        """Lose a host like in a power failure: its link is dead, and its processes send nothing more."""
        self.machines.lose(name)

    def start(self, name: str, *args: str, **environ: str) -> Any:
        """Start `python ARGS` on a host."""
        entered = ["-P", str(ENTER), str(self.machines[name].pid), *args]
        return self.python.start(entered, self.folder, {"OMP_NUM_THREADS": "1", **environ})

    def start_without_launcher(self, names: Sequence[str], *args: str, **environ: str) -> list[Any]:
        """Start `paceline ARGS` as one rank per host, by a launcher's variables."""
        meet = {"MASTER_ADDR": self.address(names[0]), "MASTER_PORT": str(PORT), "WORLD_SIZE": str(len(names))}
        one = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        command = ("-P", "-m", "paceline", *args)
        return [self.start(name, *command, RANK=str(rank), **meet, **one, **environ) for rank, name in enumerate(names)]

    def agent(
        self, name: str, *args: str, to: str, restarts: int = 0, notice_s: int = KEEP_ALIVE_S, **environ: str
    ) -> Any:
        """Start torchrun on a host, for one rank of two hosts with rendezvous at `to`, which runs `paceline ARGS`.

        After `notice_s` seconds of silence the agents remove a host from their rendezvous.
        """
        meet = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={to}:{PORT}")
        options = ("--rdzv-id=1", f"--max-restarts={restarts}", "--monitor-interval=0.1")
        conf = f"--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt={notice_s}"
        return self.start(
            name, "-m", "torch.distributed.run", *meet, *options, conf, "-m", "paceline", *args, **environ
        )

    def wait_all(self, *processes: Any, within_s: float = PATIENCE_S) -> list[Completed]:
        """Wait until these processes end; return the result of each."""
        deadline_s = time.monotonic() + within_s
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline_s:
                pytest.fail(f"it takes too long: {[stopped(process) for process in processes]}")
            time.sleep(POLL_S)
        return [stopped(process) for process in processes]

    def wait(self, is_met: Callable[[], object], *processes: Any, within_s: float = PATIENCE_S) -> None:
        """Wait until a condition holds, while these processes run."""
        deadline_s = time.monotonic() + within_s
        while not is_met():
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
    """Return the result of a process, which is killed if it still runs."""
    process.kill()
    out, err = process.communicate(timeout=PATIENCE_S)
    return Completed(process.returncode, out, err)


def namespace_of(pid: int) -> str:
    """Return the PID namespace of process `pid`, or nothing if it has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def lives_in(process: psutil.Process, home: str) -> bool:
    return namespace_of(process.pid) == home != "" and is_alive(process)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # the process ended in between
        return False


@pytest.fixture
def hosts(boot_machines, forking, tmp_path: Path) -> Iterator[Hosts]:
    """Return three hosts that have just been started, on links of 10 Gbit/s."""
    if shutil.which("tc") is None:
        pytest.skip("links are shaped by tc, which is not installed (apt-get install iproute2)")
    machines = boot_machines(SWITCH, *NAMES)
    hosts_by_test = Hosts(machines, forking, tmp_path)
    try:
        hosts_by_test.shape("10gbit")
        yield hosts_by_test
    finally:
        for name in reversed([*machines.up]):
            machines.end(name)


@pytest.fixture(scope="module")
def uninterrupted(paceline_in, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function from arguments and a number of ranks to an uninterrupted run on this machine."""
    folder = tmp_path_factory.mktemp("whole")

    def run_on(ranks: int, *args: str) -> Path:
        run = folder / str(ranks)
        if not run.exists():
            paceline_in(folder)(*args, "--ranks", str(ranks), "--run-dir", str(run)).result  # noqa: B018
        return run

    return run_on


@pytest.fixture
def same(state_digest) -> Callable[[Path, Path], None]:
    """Return a function that asserts that two runs have the same samples and final weights."""

    def check(run: Path, uninterrupted: Path) -> None:
        assert state_digest(run) == state_digest(uninterrupted)
        samples = sorted(path.name for path in uninterrupted.glob("steps.rank*.jsonl"))
        assert samples
        for name in samples:
            assert (run / name).read_text() == (uninterrupted / name).read_text()

    return check
