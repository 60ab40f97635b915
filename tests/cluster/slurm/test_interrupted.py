"""A run that Slurm interrupts is requeued and ends with the weights of an uninterrupted one."""

import contextlib
import json
import signal
from pathlib import Path

import psutil
import pytest

LENGTH = "train.steps=150"


# matrix: 21, 22
@pytest.mark.long
def test_a_run_preempted_repeatedly_has_the_same_weights(
    slurm, recipe: tuple[str, ...], uninterrupted, assert_same_run, steps_of, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    args = (*recipe, LENGTH, "checkpoint.every=1000st")
    job = slurm.begin(run, *args, "slurm.time=30min", "slurm.lead=1min")
    assert slurm.facts(job)["TimeLimit"] == "00:30:00"
    left = [0]
    interruptions = (requeue, terminate, preempt, let_time_run_out)
    for restarts, interrupt in enumerate(interruptions, start=1):
        interrupt(slurm, job, run)
        slurm.wait(job, lambda: saved_steps(run) > left[-1])  # its current step, which no checkpoint interval requires
        left.append(saved_steps(run))
        slurm.wait_for_state(job, "RUNNING", restarts)
        slurm.wait(job, lambda: steps_of(run) >= left[-1] + 5)
    slurm.wait_for_state(job, "COMPLETED")
    assert all(f"from step {step}" in slurm.output(job) for step in left[1:])
    assert_restarted(run, len(interruptions))
    assert_same_run(run, uninterrupted(*args))


@pytest.mark.long
def test_a_run_on_a_lost_node_is_requeued_when_the_node_returns(
    slurm, recipe: tuple[str, ...], uninterrupted, assert_same_run, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    args = (*recipe, "train.steps=60", "checkpoint.every=10st")
    job = slurm.begin(run, *args, steps=12)
    slurm.machines.lose("node02")
    # Slurm itself would notice only after SlurmdTimeout.
    slurm("scontrol", "update", "NodeName=node02", "State=DOWN", "Reason=lost")
    slurm.wait_for_state(job, "PENDING")
    step = saved_steps(run)
    assert 10 <= step < 60 and step % 10 == 0
    # An srun that is still alive ends the step of that name, even a new one
    slurm.wait(job, lambda: not processes_of(run))
    slurm.boot("node02")
    slurm.wait_for_state(job, "COMPLETED")
    assert f"from step {step}" in slurm.output(job)
    assert_restarted(run, 1)
    assert_same_run(run, uninterrupted(*args))


def requeue(slurm, job: str, run: Path) -> None:
    slurm("scontrol", "requeue", job)


def terminate(slurm, job: str, run: Path) -> None:
    slurm("scancel", "--signal=TERM", job)


def preempt(slurm, job: str, run: Path) -> None:
    options = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
    urgent = slurm("sbatch", "--parsable", *options, "--wrap=true")
    slurm.wait_for_state(urgent, "COMPLETED")


def let_time_run_out(slurm, job: str, run: Path) -> None:
    """Leave a job a minute of its time; Slurm checks limits every half minute, and a step takes as long."""
    ranks = [process for process in processes_of(run) if "python" in process.name()]
    assert len(ranks) == 2
    for rank in ranks:
        rank.send_signal(signal.SIGSTOP)
    slurm("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes_of(slurm, job) + 1}")
    slurm.wait(job, lambda: all(is_warned(rank) for rank in ranks))
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(signal.SIGCONT)
    slurm.wait(job, lambda: slurm.facts(job)["JobState"] == "PENDING")
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=30")  # otherwise the remaining time might be too short again


def minutes_of(slurm, job: str) -> int:
    """Return how long a job has run, in whole minutes."""
    *hours, minutes, _ = slurm.facts(job)["RunTime"].split(":")
    return 60 * int(hours[0]) + int(minutes)


def is_warned(rank: psutil.Process) -> bool:
    """Return whether a stopped rank has a pending warning of the time limit, or has exited after one."""
    try:
        status = Path(f"/proc/{rank.pid}/status").read_text()
    except OSError:  # Slurm itself may send SIGCONT
        return True
    pending = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("ShdPnd:"))
    return any(signals & 1 << (signal.SIGUSR1 - 1) for signals in pending) or rank.status() != psutil.STATUS_STOPPED


def processes_of(run: Path) -> list[psutil.Process]:
    """Return the processes whose command lines name the run directory."""
    processes = [(process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [process for process, args in processes if str(run) in args]


def saved_steps(run: Path) -> int:
    return max((int(path.name[-8:]) for path in (run / "checkpoints").glob("step-*")), default=0)


def assert_restarted(run: Path, restarts: int) -> None:
    """Assert that each start of a run recorded how often its job had been restarted."""
    rows = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    starts = [row["job_restarts"] for row in rows if row["event"] == "start"]
    assert starts == [*range(restarts + 1)]
    assert json.loads((run / "result.json").read_text())["provenance"]["job_restarts"] == restarts
