"""`paceline profile`, start to finish: real runs, real probes, and nothing left behind when it is stopped."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

TINY = ("digits", "model.width=0.1", "data.batch_size=32", "parallel.threads=1", "measure.warmup_steps=1")
LIMIT_S = 120


def test_a_profile_on_two_ranks_measures_the_recipe_and_what_each_part_of_it_costs(paceline, tmp_path: Path) -> None:
    """Batches that lie ready already leave two probes to run; buckets are timed in the run that is traced."""
    options = ("--steps", "3", "--trace", "--ranks", "2", "--run-dir", "run", "--json")
    words = (*TINY, "measure.warmup_steps=2", "data.replay=device", *options)
    found = paceline("profile", *words).result
    run = tmp_path / "run"
    assert found == json.loads((run / "profile.json").read_text())
    names = ["free-communication", "free-model"]
    assert [probe["name"] for probe in found["probes"]] == names and found["left_out"] == []
    assert all(probe["ratio"] > 0 and probe["images_per_s"] > 0 for probe in found["probes"])
    assert (found["steps"], found["ranks"], found["base"]["n"]) == (3, 2, 1)
    assert sorted(found["ceilings"]) == ["free_communication", "free_model"]
    result = json.loads((run / "result.json").read_text())
    assert found["base"]["images_per_s"] == result["throughput"]["images_per_s"]
    assert (result["steps"], result["eval"], result["world_size"]) == (5, None, 2)
    assert result["communication"]["wire_s"] is None and result["stages"]["exposed_communication"]["host_s"] > 0
    assert found["communication"]["exposed_s"] == result["communication"]["exposed_s"] > 0
    assert found["timed_run"] == "trace" and found["communication"]["wire_s"] > 0
    assert found["trace_share"] > 0 and (run / "trace.json.gz").exists() and (run / "trace" / "rank1.json.gz").exists()
    cost = found["cost"]
    assert cost["achieved_flops_per_s"] == pytest.approx(cost["flops_per_image"] * found["base"]["images_per_s"] / 2)
    assert cost["mfu"] > 0 and cost["roofline_share"] > 0
    assert not list((run / "checkpoints").iterdir())
    page = (run / "report.html").read_text()
    assert all(name in page for name in names)


def test_a_profile_of_data_that_is_not_there_is_one_error_line_and_leaves_nothing(paceline, tmp_path: Path) -> None:
    paceline("profile", "folder", "data.source.root=nowhere", "--ranks", "1").says("nowhere")
    assert not list(tmp_path.iterdir())


def test_ctrl_c_ends_the_run_that_is_measured_and_the_profile(paceline, tmp_path: Path) -> None:
    process = paceline.start("profile", *TINY, "--steps", "100000", "--ranks", "1", "--run-dir", "run")
    deadline_s = time.monotonic() + LIMIT_S
    attempts = tmp_path / "run" / "attempts.jsonl"  # the first thing that a run writes
    while not attempts.exists() and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    children = [int(pid) for pid in children_of(process.pid)]
    assert len(children) == 1
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out, err) == (130, "4 runs of 100,001 steps\n", "")
    with pytest.raises(ProcessLookupError):
        os.kill(children[0], 0)


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
