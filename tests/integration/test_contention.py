"""CPU starvation of a run beside real busy processes, and of a run alone."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.core.results import RunResult

CORES = sorted(os.sched_getaffinity(0))[:2]
COUNT = "import time\nend = time.monotonic() + 240\nwhile time.monotonic() < end: pass"
ARGS = (
    "digits", "model.width=0.1", "data.batch_size=16", "data.workers=0", "train.steps=44", "measure.warmup_steps=4",
    "train.eval_every=off", "checkpoint.every=off", "parallel.device=cpu",
)  # fmt: skip


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Run `number` busy processes on the run's cores."""
    command = ["taskset", "-c", ",".join(map(str, CORES)), sys.executable, "-S", "-c", COUNT]
    processes = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(timeout=60)


def train_beside(paceline, *args: str, num_busy: int = 0) -> tuple[dict[str, Any], str]:
    """Train, from the first step on beside `num_busy` busy processes; return the result and the printed summary."""
    process = paceline.start("train", *ARGS, *args, "--run-dir", "run", COLUMNS="1000")
    os.sched_setaffinity(process.pid, CORES)
    started = paceline.folder / "run" / "attempts.jsonl"
    deadline_s = time.monotonic() + 120
    while not started.exists() and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    with busy(num_busy):
        output, complaint = process.communicate()
    assert process.returncode == 0, complaint
    return json.loads((paceline.folder / "run" / "result.json").read_text()), output


def test_a_run_beside_eight_busy_processes_is_reported_as_cpu_starved(paceline) -> None:
    """On two cores the run's thread gets two of nine time slices, or half if the kernel shares the CPU by session."""
    result, summary = train_beside(paceline, "parallel.threads=1", num_busy=8)
    verdict = result["verdict"]
    assert verdict["bottleneck"] == "cpu-starved", (verdict, result["cpu"])
    assert (verdict["ceiling"], verdict["try"]) == ("", "")
    assert result["cpu"]["share"] > 0.3
    assert result["cpu"]["lost_s"] > 0.3 * result["cpu"]["wall_s"]
    assert RunResult.model_validate(result).starved == result["cpu"]["share"]
    assert f"other processes held the cores {100 * result['cpu']['share']:.0f} % of the time" in summary
    assert "cpu-starved" in (paceline.folder / "run" / "report.html").read_text()


def test_lost_cpu_time_is_at_most_what_other_processes_used(paceline) -> None:
    """Holds under any load: an idle machine has no other processes, and the run is not starved."""
    result, _ = train_beside(paceline, "parallel.threads=1")
    cpu = result["cpu"]
    assert (cpu["cores"], cpu["threads"], cpu["ranks"]) == (len(CORES), 1, 1)
    assert cpu["run_s"] > 0
    assert cpu["lost_s"] <= cpu["others_cores"] * cpu["wall_s"] + 0.05
    assert (result["verdict"]["bottleneck"] == "cpu-starved") <= (cpu["share"] >= 0.1)
