"""Commands that are observed for a number of steps and then ended, with records in place of real training."""

import os
import sys
import time
from pathlib import Path

import pytest

from paceline.core.errors import PacelineError
from paceline.watch.measured_run import read_measured, run_measured

RECORDS = """
import json, os, sys, time
from pathlib import Path

def write_records(rank, world_size, num_steps, losses=lambda n: 1 / n):
    file = Path(os.environ["PACELINE_WATCH_DIR"], f"host-{rank}.jsonl").open("a")
    clock = {"started_s": 0.0, "unix_s": 1e9, "clock_s": 0.0}
    lines = [{"kind": "process", "pid": rank, "host": "host", "rank": rank, "world_size": world_size, **clock}]
    lines.append({"kind": "pause", "name": "epoch_boundary", "start_s": 3.0, "end_s": 3.25})
    lines.append({"kind": "pause", "name": "evaluate", "start_s": 4.0, "end_s": 4.5})
    for n in range(1, num_steps + 1):
        lines.append({"kind": "step", "n": n, "start_s": n - 1, "end_s": n, "stages": {"forward": 1.0}})
        lines.append({"kind": "loss", "n": n, "loss": losses(n)})
    file.write("".join(json.dumps(line) + chr(10) for line in lines))
    file.flush()
"""


def measure(tmp_path: Path, script: str, *, steps: int = 4, timeout_s: float = 30.0):
    return run_measured(
        [sys.executable, "-c", RECORDS + script], os.environ, tmp_path, warmup=2, steps=steps, timeout_s=timeout_s
    )


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_a_command_is_ended_once_it_has_enough_steps(tmp_path):
    run = measure(tmp_path, "write_records(0, 1, 9)\ntime.sleep(60)")
    assert (run.failure, run.exit_code) == ("", None)
    assert run.step_seconds == (1.0, 0.75, 0.5, 1.0)
    assert run.span_s == pytest.approx((4 - 0.5) / 4)  # the start of an epoch is a part of training, an evaluation not
    assert run.losses == {n: 1 / n for n in range(1, 10)}
    assert run.result.steps == 9


def test_processes_below_the_command_end_with_it(tmp_path):
    """Also those in a session of their own, as torchrun starts its ranks, that ignore SIGTERM."""
    script = """
import signal, subprocess
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True, stdout=subprocess.PIPE)
process.stdout.readline()
print(process.pid, flush=True)
write_records(0, 1, 6)
time.sleep(60)
"""
    assert measure(tmp_path, script).failure == ""
    pid = int((tmp_path / "output.log").read_text())
    limit_s = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < limit_s:
        time.sleep(0.01)
    assert not is_running(pid)


def test_all_ranks_must_take_the_steps(tmp_path):
    late = measure(tmp_path, "write_records(0, 2, 9); write_records(1, 2, 5); time.sleep(60)", timeout_s=5.0)
    assert late.failure.startswith("took 5 steps of 6 in 5 s")


def test_a_command_that_ends_early_says_how_and_what_it_printed(tmp_path):
    run = measure(tmp_path, "write_records(0, 1, 3)\nraise SystemExit('no such folder: /data')")
    assert run.exit_code == 1
    assert run.failure == "took 3 steps of 6 and ended with exit code 1: no such folder: /data"
    ended = measure(tmp_path / "ended", "print('nothing to train')")
    assert ended.failure == "took no step of a PyTorch optimizer and ended: nothing to train"


def test_the_error_of_a_rank_is_named_and_not_that_of_its_launcher(tmp_path):
    script = """
for line in "[rank1]: ValueError: no images", "Root Cause:", "torch.ChildFailedError: ", "=" * 60:
    print(line)
raise SystemExit(1)
"""
    assert measure(tmp_path, script).failure.endswith("exit code 1: [rank1]: ValueError: no images")


def test_a_command_that_has_ended_by_itself_with_enough_steps_counts(tmp_path, monkeypatch):
    # Otherwise the records may be seen, and the command ended, while its interpreter shuts down.
    monkeypatch.setattr("paceline.watch.measured_run._POLL_S", 20.0)
    run = measure(tmp_path, "write_records(0, 1, 6, lambda n: float('nan'))")
    assert (run.failure, run.exit_code) == ("", 0)
    assert all(loss != loss for loss in run.losses.values())


def test_a_run_is_read_again_if_it_has_enough_steps(tmp_path):
    command = [sys.executable, "-c", RECORDS + "write_records(0, 1, 9)\ntime.sleep(60)"]
    run = run_measured(command, os.environ, tmp_path / "run", warmup=2, steps=4, timeout_s=30)
    assert read_measured(command, tmp_path / "run", warmup=2, steps=4) == run
    assert measure(tmp_path / "early", "write_records(0, 1, 3)").failure
    assert read_measured(command, tmp_path / "early", warmup=2, steps=4) is None


def test_an_observer_that_fails_ends_the_command(tmp_path):
    script = """
write_records(0, 1, 2)
note = json.dumps({"kind": "note", "text": "the observer stopped after an error: planted"})
Path(os.environ["PACELINE_WATCH_DIR"], "host-0.jsonl").open("a").write(note + chr(10))
time.sleep(60)
"""
    assert measure(tmp_path, script).failure == "took 2 steps of 6: the observer stopped after an error: planted"


def test_a_missing_program_is_refused(tmp_path):
    with pytest.raises(PacelineError, match="no-such-program is not a program"):
        run_measured(["no-such-program"], os.environ, tmp_path, warmup=0, steps=1, timeout_s=1.0)
