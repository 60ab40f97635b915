"""In a real Slurm, a preempted run is queued again and goes on, and one that meets its time limit saves before it."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "sinfo")
TEMPLATE = Path(__file__).parent / "slurm" / "slurm.conf"
WORDS = (
    "train",
    "synthetic",
    "model.width=0.1",
    "data.source.num_images=240",
    "data.source.num_val_images=24",
    "data.batch_size=12",
    "data.augment=[pad_crop,flip]",
    "data.workers=1",
    "train.ema.decay=0.9",
    "log.every=1st",
    "log.samples=true",
    "log.tensorboard=off",
    "parallel.threads=1",
)
BATCH = """#!/bin/sh
#SBATCH --ntasks=2 --requeue --open-mode=append
srun --kill-on-bad-exit=1 {command}
code=$?
echo "ended with $code"
[ $code -eq 75 ] && [ -n "$REQUEUE" ] && scontrol requeue $SLURM_JOB_ID  # Slurm alone would call it FAILED
exit $code
"""
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED")
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Cluster:
    """A running Slurm, whose programs find it by `environ`, and that may be used below `folder`."""

    folder: Path
    environ: dict[str, str]

    def __call__(self, *command: str) -> str:
        """Run one of Slurm's programs; return what it says."""
        ended = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60, cwd=self.folder)
        assert ended.returncode == 0, (command, ended.stdout, ended.stderr)
        return ended.stdout.strip()

    def submit(self, words: tuple[str, ...], *options: str) -> str:
        """Queue `paceline WORDS` on two ranks; return the job's number. What it says is in `NUMBER.out`."""
        command = " ".join([sys.executable, "-P", "-m", "paceline", *words])
        script = self.folder / "batch.sh"
        script.write_text(BATCH.format(command=command))
        return self("sbatch", "--parsable", f"--output={self.folder}/%j.out", *options, str(script))

    def said(self, job: str) -> str:
        """Return what a job has said so far."""
        path = self.folder / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def facts(self, job: str) -> dict[str, str]:
        """Return what Slurm knows about a job."""
        words = self("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, is_there: Callable[[], bool]) -> None:
        """Wait until something is there."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_there():
            has_ended = self.facts(job)["JobState"] in ENDED and not is_there()
            assert time.monotonic() < deadline_s and not has_ended, f"{self.facts(job)}\n{self.said(job)}"
            time.sleep(0.3)

    def wait_for_state(self, job: str, *states: str) -> None:
        """Wait until a job is in one of `states`; one that was queued again is not made to wait two minutes."""

        def is_there() -> bool:
            facts = self.facts(job)
            if facts["JobState"] == "PENDING" and facts["Reason"] == "BeginTime":
                self("scontrol", "update", f"JobId={job}", "StartTime=now")
            return facts["JobState"] in states

        self.wait(job, is_there)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs Slurm, {missing[0]} is not installed (apt-get install slurmctld slurmd slurm-client munge)")
    if os.geteuid() != 0:
        pytest.skip("Slurm's node daemon needs root")
    folder = tmp_path_factory.mktemp("slurm")
    host = socket.gethostname().partition(".")[0]
    ports = {"controller_port": free_port(), "node_port": free_port()}
    (folder / "slurm.conf").write_text(TEMPLATE.read_text().format(folder=folder, host=host, **ports))
    (folder / "plugstack.conf").touch()
    (folder / "state").mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RANK", "WORLD"))}
    cluster = Cluster(folder, {**clean, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"})
    try:
        start_daemons(cluster, host)
        yield cluster
    finally:
        stop_daemons(folder)


def start_daemons(cluster: Cluster, host: str) -> None:
    folder = cluster.folder
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    files = {"socket": "munge.socket", "key-file": "munge.key", "log-file": "munged.log", "pid-file": "munged.pid"}
    files["seed-file"] = "munged.seed"
    cluster("munged", "--force", *(f"--{option}={folder / name}" for option, name in files.items()))
    cluster("slurmctld")
    cluster("slurmd", "-N", host)
    deadline_s = time.monotonic() + 30
    while cluster("sinfo", "--noheader", "--states=idle", "--format=%D") != "1":
        assert time.monotonic() < deadline_s, (folder / "slurmctld.log").read_text()
        time.sleep(0.1)


def stop_daemons(folder: Path) -> None:
    """End what was started in `folder`; a node's daemon that still waits for a job is not waited for."""
    daemons = [psutil.Process(int(path.read_text())) for path in folder.glob("*.pid") if path.stat().st_size]
    for daemon in daemons:
        daemon.terminate()
    _, alive = psutil.wait_procs(daemons, timeout=2)
    for daemon in alive:
        daemon.kill()
    _, alive = psutil.wait_procs(alive, timeout=5)
    assert not alive


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def steps_of(run: Path) -> int:
    path = run / "steps.rank0.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kept(run: Path) -> int:
    return max((int(path.name[-8:]) for path in (run / "checkpoints").glob("step-*")), default=0)


# matrix: 21
def test_a_preempted_run_is_queued_again_and_ends_with_the_same_bits(
    slurm: Cluster, paceline, tmp_path: Path, state_digest
) -> None:
    words = (*WORDS, "train.steps=60", "checkpoint.every=50st")
    run = tmp_path / "run"
    job = slurm.submit((*words, "--run-dir", str(run), "--json"), "--export=ALL,REQUEUE=yes")
    slurm.wait(job, lambda: steps_of(run) > 5)
    urgent = slurm("sbatch", "--parsable", "--partition=urgent", "--ntasks=2", "--output=/dev/null", "--wrap=sleep 1")
    slurm.wait_for_state(job, "PENDING")
    done = steps_of(run)
    assert done < 50
    assert kept(run) == done  # the step it was at, which no cadence asked for
    slurm.wait_for_state(urgent, "COMPLETED")
    slurm.wait_for_state(job, "COMPLETED")
    assert slurm.facts(job)["Restarts"] == "1"
    assert f"from step {done}" in slurm.said(job)
    whole = paceline(*words, "--ranks", "2", "--run-dir", "whole", "--json").result
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("completed", 60)
    assert result["weights_sha256"] == whole["weights_sha256"]
    assert state_digest(run) == state_digest(tmp_path / "whole")
    for rank in range(2):
        name = f"steps.rank{rank}.jsonl"
        assert (run / name).read_text() == (tmp_path / "whole" / name).read_text()


# matrix: 22
def test_a_run_that_meets_its_time_limit_saves_before_it(slurm: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = (*WORDS, "train.steps=100000", "checkpoint.every=90000st", "--run-dir", str(run), "--json")
    start_s = time.monotonic()
    job = slurm.submit(words, "--time=60", "--signal=USR1@10")
    slurm.wait(job, lambda: steps_of(run) > 5)
    # Slurm sends the signal up to a minute early, and a machine may be slow to start: so the limit is set from here.
    elapsed_s = time.monotonic() - start_s
    minutes = 1 if elapsed_s < 20 else int(elapsed_s // 60) + 2
    slurm("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    slurm.wait_for_state(job, *ENDED)
    assert time.monotonic() - start_s < 60 * minutes
    assert "ended with 75" in slurm.said(job)
    assert slurm.facts(job)["ExitCode"] == "75:0"
    assert kept(run) == steps_of(run) > 0
    assert json.loads((run / "result.json").read_text())["status"] == "preempted"


def test_ranks_are_measured_as_steps_of_an_allocation(slurm: Cluster, tmp_path: Path) -> None:
    """The batch script's own place in the job, and what it asked for in all, are none of the steps'."""
    folder = tmp_path / "scaling"
    words = ("scale", *WORDS[1:], "measure.warmup_steps=1", "--nodes=1", "--ranks=2", "--steps=2", "--repeats=1")
    program = " ".join([sys.executable, "-P", "-m", "paceline", *words, "--json", "--run-dir", str(folder)])
    output = f"--output={slurm.folder}/%j.out"
    job = slurm("sbatch", "--parsable", "--ntasks=2", "--ntasks-per-node=2", output, f"--wrap={program}")
    slurm.wait_for_state(job, "COMPLETED")
    (point,) = json.loads((folder / "experiment.json").read_text())["points"]
    assert (point["ranks"], point["nodes"], point["error"]) == (2, 1, "")
    (run,) = point["runs"]
    result = json.loads((folder / run / "result.json").read_text())
    assert (result["world_size"], result["provenance"]["launcher"]) == (2, "slurm")
