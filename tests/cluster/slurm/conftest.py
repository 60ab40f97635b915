"""A real Slurm on three machines: `login`, which runs its controller, and two nodes.

Its daemons are started once for the tests of this folder, in a network of their own.
"""

import gzip
import json
import os
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
TEMPLATE = Path(__file__).with_name("slurm.conf")
LOGIN, NODES = "login", ("node01", "node02")
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED")
PATIENCE_S = 120.0
START_S = 30.0
POLL_S = 0.05
# The course's recipe, so small that a step takes little time on two cores, with every sample logged.
RECIPE = (
    "course/wideresnet-fashion",
    "model.width=0.1",
    "data.batch_size=12",
    "checkpoint.every=50st",
    "log.every=1st",
    "log.samples=true",
    "log.tensorboard=off",
    "log.report=off",
    "data.workers=0",
    "parallel.threads=1",
)


@dataclass(frozen=True)
class Cluster:
    """A running Slurm. Its programs and paceline run on `login`, in `folder`, where its files are."""

    folder: Path
    machines: Any
    environ: dict[str, str]

    def on(self, name: str, *args: str, folder: Path | None = None, limit_s: float = PATIENCE_S) -> Any:
        """Run a program on a machine; return its exit code and output."""
        machine = self.machines[name]
        return machine.run(*args, folder=folder or self.folder, environ=self.environ, limit_s=limit_s)

    def __call__(self, *args: str) -> str:
        """Run one of Slurm's programs; return its output."""
        completed = self.on(LOGIN, *args)
        assert completed.returncode == 0, (args, completed.stdout, completed.stderr)
        return completed.stdout.strip()

    def paceline(self, *args: str, folder: Path | None = None) -> Any:
        """Run paceline on the login node."""
        return self.on(LOGIN, sys.executable, "-P", "-m", "paceline", *args, folder=folder)

    def submit(self, *args: str, folder: Path | None = None) -> dict[str, Any]:
        """Submit a job by `paceline submit`; return its JSON."""
        completed = self.paceline("submit", "--engine", "slurm", "--json", *args, folder=folder)
        assert completed.returncode == 0, completed.stderr
        return json.loads(completed.stdout)

    def facts(self, job: str) -> dict[str, str]:
        """Return Slurm's record of a job."""
        args = self("scontrol", "--oneliner", "show", "job", job).split()
        return dict(setting.split("=", 1) for setting in args if "=" in setting)

    def output(self, job: str) -> str:
        """Return the output of a job so far."""
        path = Path(self.facts(job)["StdOut"])
        return path.read_text() if path.exists() else ""

    def wait(self, job: str, is_met: Callable[[], bool]) -> None:
        """Wait until a condition holds, and fail if the job ends before."""
        deadline_s = time.monotonic() + PATIENCE_S
        for look in count():
            if is_met():
                return
            if look % 10 == 9:
                facts = self.facts(job)
                is_over = time.monotonic() > deadline_s or facts["JobState"] in ENDED
                assert not is_over or is_met(), f"{facts}\n{self.output(job)}"
            time.sleep(POLL_S)

    def wait_for_state(self, job: str, state: str, restarts: int = 0) -> dict[str, str]:
        """Wait until a job is in `state` and has been restarted `restarts` times; return Slurm's record of it.

        A requeued job does not wait until its old credentials have expired, but does wait for its old processes.
        """
        deadline_s, is_hurried = time.monotonic() + PATIENCE_S, False
        while (facts := self.facts(job))["JobState"] != state or int(facts["Restarts"]) < restarts:
            is_over = time.monotonic() > deadline_s or facts["JobState"] in ENDED
            assert not is_over, f"{facts}\n{self.output(job)}"
            if (facts["JobState"], facts["Reason"], is_hurried) == ("PENDING", "BeginTime", False):
                # If it started immediately, it would receive messages about the earlier batch script.
                self("scontrol", "update", f"JobId={job}", "StartTime=now+2seconds")
                is_hurried = True
            time.sleep(4 * POLL_S)
        return facts

    def begin(self, run: Path, *args: str, steps: int = 5) -> str:
        """Submit a training run on both nodes, and wait until it has taken some steps; return the job."""
        job = self.submit(*args, "--nodes", "2", "--run-dir", str(run))["job_id"]
        self.wait(job, lambda: count_steps(run) >= steps)
        return job

    def boot(self, name: str) -> None:
        """Restart a lost node."""
        self.machines.boot(name)
        self.start_node(name)

    def start_node(self, name: str) -> None:
        """Start the Slurm daemon of a node in the background."""
        completed = self.on(name, "slurmd", "-N", name)
        assert completed.returncode == 0, completed.stderr

    def start(self) -> None:
        """Start all daemons, and wait until the nodes are available."""
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = {"socket": "munge.socket", "key-file": "munge.key", "log-file": "munged.log"}
        files |= {"pid-file": "munged.pid", "seed-file": "munged.seed"}
        self("munged", "--force", *(f"--{option}={self.folder / name}" for option, name in files.items()))
        self("slurmctld")
        for name in NODES:
            self.start_node(name)
        deadline_s = time.monotonic() + START_S
        while self("sinfo", "--noheader", "--states=idle", "--format=%D") != str(len(NODES)):
            assert time.monotonic() < deadline_s, (self.folder / "slurmctld.log").read_text()
            time.sleep(POLL_S)


def count_steps(run: Path) -> int:
    path = run / "steps.rank0.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture(scope="package")
def steps_of() -> Callable[[Path], int]:
    """Return a function from a run directory to the number of steps that its run has taken."""
    return count_steps


@pytest.fixture(scope="package")
def slurm(tmp_path_factory: pytest.TempPathFactory, boot_machines) -> Iterator[Cluster]:
    """Return a running Slurm, or skip."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs Slurm, {missing[0]} is not installed (apt-get install slurmctld slurmd slurm-client munge)")
    machines = boot_machines(LOGIN, *NODES)
    folder = tmp_path_factory.mktemp("slurm")
    lines = [f"NodeName={name} NodeAddr={machines.address(name)} CPUs=2 RealMemory=2000" for name in NODES]
    facts = {"folder": folder, "controller": machines.address(LOGIN), "nodes": "\n".join(lines)}
    (folder / "slurm.conf").write_text(TEMPLATE.read_text().format(**facts))
    (folder / "plugstack.conf").touch()
    (folder / "state").mkdir()
    (folder / "home").mkdir()  # without a site configuration of the user
    not_ours = ("SLURM_", "SBATCH_", "RANK", "WORLD", "PACELINE_", "XDG_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(not_ours)}
    ours = {"SLURM_CONF": str(folder / "slurm.conf"), "HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    cluster = Cluster(folder, machines, clean | ours)
    cluster.start()
    try:
        yield cluster
    finally:
        for name in (*NODES, LOGIN):
            if name in machines.up:
                machines.end(name)


@pytest.fixture(scope="package")
def fashion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of synthetic images in the format of Fashion-MNIST: 240 to train on, and 24 to validate."""
    folder = tmp_path_factory.mktemp("fashion")
    drawn = np.random.default_rng(0)
    for stem, num_images in (("train", 240), ("t10k", 24)):
        images = drawn.integers(0, 256, (num_images, 28, 28), dtype=np.uint8)
        labels = np.arange(num_images, dtype=np.uint8) % 10
        header = struct.pack(">IIII", 0x803, num_images, 28, 28)
        (folder / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
        header = struct.pack(">II", 0x801, num_images)
        (folder / f"{stem}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + labels.tobytes()))
    return folder


@pytest.fixture(scope="package")
def recipe(fashion: Path) -> tuple[str, ...]:
    """Return the arguments of a training run on two ranks, except its length."""
    return (*RECIPE, f"data.source.root={fashion}")


@pytest.fixture(scope="package")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, paceline_in) -> Callable[..., Path]:
    """Return a function from a recipe's arguments to its uninterrupted run on two local ranks."""
    known: dict[tuple[str, ...], Path] = {}

    def run_of(*args: str) -> Path:
        if args not in known:
            folder = tmp_path_factory.mktemp("whole")
            paceline_in(folder)("train", *args, "--ranks", "2", "--run-dir", "run", "--json").result  # noqa: B018
            known[args] = folder / "run"
        return known[args]

    return run_of


@pytest.fixture(scope="package")
def assert_same_run(state_digest) -> Callable[[Path, Path], None]:
    """Return a function that asserts that two runs have the same samples and final weights."""

    def check(run: Path, other: Path) -> None:
        ours, theirs = (json.loads((each / "result.json").read_text()) for each in (run, other))
        for name in ("status", "steps", "images_seen", "world_size", "recipe_hash", "weights_sha256", "eval"):
            assert ours[name] == theirs[name], name
        assert state_digest(run) == state_digest(other)
        for rank in range(ours["world_size"]):
            name = f"steps.rank{rank}.jsonl"
            assert (run / name).read_text() == (other / name).read_text()

    return check
