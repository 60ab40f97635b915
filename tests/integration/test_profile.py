"""`paceline profile` with real runs and probes, and its cleanup after an interruption."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

TINY = ("digits", "model.width=0.1", "data.batch_size=32", "parallel.threads=1", "measure.warmup_steps=1",
        "log.worst=0", "log.tensorboard=off")  # fmt: skip
LIMIT_S = 120


def test_a_profile_on_two_ranks_measures_the_recipe_and_its_probes(paceline, tmp_path: Path) -> None:
    """With replayed batches two probes remain; communication is timed in the traced run."""
    options = ("--steps", "3", "--trace", "--ranks", "2", "--run-dir", "run", "--json")
    args = (*TINY, "measure.warmup_steps=2", "data.replay=device", *options)
    profile = paceline("profile", *args).result
    run = tmp_path / "run"
    assert profile == json.loads((run / "profile.json").read_text())
    names = ["free-communication", "free-model"]
    assert [probe["name"] for probe in profile["probes"]] == names and profile["left_out"] == []
    assert all(probe["ratio"] > 0 and probe["images_per_s"] > 0 for probe in profile["probes"])
    assert (profile["steps"], profile["ranks"], profile["base"]["n"]) == (3, 2, 1)
    # Beside busy processes nothing is claimed.
    is_starved = profile["verdict"]["bottleneck"] == "cpu-starved"
    assert sorted(profile["ceilings"]) == ([] if is_starved else ["free_communication", "free_model"])
    result = json.loads((run / "result.json").read_text())
    assert profile["base"]["images_per_s"] == result["throughput"]["images_per_s"]
    assert (result["steps"], result["eval"], result["world_size"]) == (5, None, 2)
    assert result["communication"]["wire_s"] is None and result["stages"]["exposed_communication"]["host_s"] > 0
    assert profile["communication"]["exposed_s"] == result["communication"]["exposed_s"] > 0
    assert profile["timed_run"] == "trace" and profile["communication"]["wire_s"] > 0
    assert (
        profile["trace_share"] > 0 and (run / "trace.json.gz").exists() and (run / "trace" / "rank1.json.gz").exists()
    )
    cost = profile["cost"]
    assert cost["achieved_flops_per_s"] == pytest.approx(cost["flops_per_image"] * profile["base"]["images_per_s"] / 2)
    assert cost["mfu"] > 0 and cost["roofline_share"] > 0
    assert not list((run / "checkpoints").iterdir())
    page = (run / "report.html").read_text()
    assert all(name in page for name in names)


def test_a_profile_of_missing_data_is_refused_and_writes_nothing(paceline, tmp_path: Path) -> None:
    paceline("profile", "folder", "data.source.root=nowhere", "--ranks", "1").assert_error("nowhere")
    assert not list(tmp_path.iterdir())


def test_ctrl_c_ends_the_profile_and_its_current_run(paceline, tmp_path: Path) -> None:
    process = paceline.start("profile", *TINY, "--steps", "100000", "--ranks", "1", "--run-dir", "run")
    deadline_s = time.monotonic() + LIMIT_S
    attempts = tmp_path / "run" / "attempts.jsonl"  # the first file that a run writes
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
