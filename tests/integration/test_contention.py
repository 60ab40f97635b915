"""A run beside real busy processes, and one without: whose the cores were."""

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
WORDS = (
    "digits", "model.width=0.1", "data.batch_size=16", "data.workers=0", "train.steps=44", "measure.warmup_steps=4",
    "train.eval_every=off", "checkpoint.every=off", "parallel.device=cpu",
)  # fmt: skip


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Have so many processes count meanwhile on two cores, in this session, as the run is."""
    command = ["taskset", "-c", ",".join(map(str, CORES)), sys.executable, "-S", "-c", COUNT]
    processes = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(timeout=60)


def trained(paceline, *words: str, num_busy: int = 0) -> tuple[dict[str, Any], str]:
    """Train; return the result, and the summary that was printed. From the first step on others are busy beside it."""
    process = paceline.start("train", *WORDS, *words, "--run-dir", "run", COLUMNS="1000")
    os.sched_setaffinity(process.pid, CORES)
    started = paceline.folder / "run" / "attempts.jsonl"
    deadline_s = time.monotonic() + 120
    while not started.exists() and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    with busy(num_busy):
        said, complaint = process.communicate()
    assert process.returncode == 0, complaint
    return json.loads((paceline.folder / "run" / "result.json").read_text()), said


def test_beside_eight_busy_processes_a_run_is_starved_and_says_so_everywhere(paceline) -> None:
    """On two cores its thread gets two turns of nine, or half of them where the kernel shares by session."""
    result, summary = trained(paceline, "parallel.threads=1", num_busy=8)
    verdict = result["verdict"]
    assert verdict["bottleneck"] == "cpu-starved", (verdict, result["cpu"])
    assert (verdict["ceiling"], verdict["try"]) == ("", "")
    assert result["cpu"]["share"] > 0.3
    assert result["cpu"]["lost_s"] > 0.3 * result["cpu"]["wall_s"]
    assert RunResult.model_validate(result).starved == result["cpu"]["share"]
    assert f"Other processes held the cores {100 * result['cpu']['share']:.0f} % of the time" in summary
    assert "cpu-starved" in (paceline.folder / "run" / "report.html").read_text()


def test_a_run_is_charged_with_no_more_than_others_used(paceline) -> None:
    """Whatever others do meanwhile: on a quiet machine that is nothing, and the run is not starved."""
    result, _ = trained(paceline, "parallel.threads=1")
    cpu = result["cpu"]
    assert (cpu["cores"], cpu["threads"], cpu["ranks"]) == (len(CORES), 1, 1)
    assert cpu["run_s"] > 0
    assert cpu["lost_s"] <= cpu["others_cores"] * cpu["wall_s"] + 0.05
    assert (result["verdict"]["bottleneck"] == "cpu-starved") <= (cpu["share"] >= 0.1)
