"""`measure.chrome`: stages in a row of their own, ranks on one axis, totals; on traces written by hand."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.measure.chrome_trace import MARK, merge_traces, rewrite_trace, stage_switch_mark, trace_totals

PID = 4321
BASE_NS = 1_790_000_000_000_000_000


def ranged(
    name: str, start_us: float, stop_us: float, *, cat: str = "user_annotation", tid: int = PID
) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": PID, "tid": tid, "ts": start_us, "dur": stop_us - start_us}


def recording(*events: dict[str, Any]) -> dict[str, Any]:
    """Return what Kineto writes around events."""
    named = {"ph": "M", "name": "process_name", "ts": 0.0, "pid": PID, "tid": 0, "args": {"name": "python"}}
    return {
        "schemaVersion": 1,
        "host_name": "secret",
        "traceName": "/home/secret/recorded.json",
        "distributedInfo": {"backend": "gloo", "rank": 7, "world_size": 9},
        "traceEvents": [named, *events],
        "baseTimeNanoseconds": BASE_NS,
    }


def rewritten(tmp_path: Path, recorded: dict[str, Any], *, rank: int = 1, stop: int = 100) -> Path:
    source, out = tmp_path / "recorded.json", tmp_path / f"rank{rank}.json.gz"
    source.write_text(json.dumps(recorded))
    rewrite_trace(source, out, rank=rank, world_size=2, stop=stop)
    return out


def read(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        return json.load(file)


def stages_of(trace: dict[str, Any]) -> list[tuple[str, float, float]]:
    return [
        (event["name"], event["ts"], event["dur"])
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["tid"] == 0
    ]


def test_a_rank_says_which_it_is_and_nothing_of_its_host(tmp_path: Path) -> None:
    trace = read(rewritten(tmp_path, recording()))

    assert trace["distributedInfo"] == {"backend": "gloo", "rank": 1, "world_size": 2}
    assert "secret" not in json.dumps(trace)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank1.json.gz", "recorded.json"]


def test_stages_are_in_a_thread_of_their_own_and_all_else_stays(tmp_path: Path) -> None:
    inside = ranged("aten::conv2d", 11.0, 19.0, cat="cpu_op")
    on_gpu = ranged(f"{MARK}forward", 15.0, 25.0, cat="gpu_user_annotation", tid=7)
    trace = read(rewritten(tmp_path, recording(ranged(f"{MARK}forward", 10.0, 20.0), inside, on_gpu)))

    assert stages_of(trace) == [("forward", 10.0, 10.0)]
    assert inside in trace["traceEvents"]
    assert on_gpu | {"name": "forward"} in trace["traceEvents"]
    names = [event["args"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert names == [{"name": "stages"}]


def test_a_stage_is_divided_where_it_was_turned(tmp_path: Path) -> None:
    trace = read(
        rewritten(
            tmp_path,
            recording(
                ranged(stage_switch_mark("other"), 1.0, 1.5),  # of a stage that began before the recording
                ranged(f"{MARK}forward", 10.0, 20.0),
                ranged(stage_switch_mark("exposed_communication"), 12.0, 12.5),
                ranged(stage_switch_mark("forward"), 15.0, 15.5),
                ranged(f"{MARK}backward", 20.0, 40.0),
                ranged(stage_switch_mark("exposed_communication"), 36.0, 36.5, tid=99),
            ),
        )
    )

    assert stages_of(trace) == [
        ("forward", 10.0, 2.0),
        ("exposed_communication", 12.0, 3.0),
        ("forward", 15.0, 5.0),
        ("backward", 20.0, 16.0),
        ("exposed_communication", 36.0, 4.0),
    ]


def test_totals_are_of_the_completed_steps(tmp_path: Path) -> None:
    path = rewritten(
        tmp_path,
        recording(
            ranged(f"{MARK}forward", 1_000.0, 2_000.0),  # of no step
            ranged("ProfilerStep#3", 10_000.0, 20_000.0),
            ranged(f"{MARK}forward", 11_000.0, 14_000.0),
            ranged(f"{MARK}backward", 15_000.0, 19_000.0),
            ranged("ProfilerStep#4", 20_000.0, 30_000.0),
            ranged(f"{MARK}forward", 20_000.0, 22_000.0),
            ranged("forward", 24_000.0, 25_000.0),  # the model's own
            ranged("ProfilerStep#5", 30_000.0, 40_000.0),
            ranged(f"{MARK}forward", 31_000.0, 39_000.0),
        ),
        stop=5,
    )

    assert trace_totals(path) == pytest.approx({"forward": 0.005, "backward": 0.004}, rel=1e-12)


def test_ranks_are_merged_on_one_axis(tmp_path: Path) -> None:
    """Rank 1's recording began 2 ms after rank 0's, and its host's clock is 5 ms ahead: its 10 ms are 7 of rank 0."""
    step, arrow = ranged("ProfilerStep#3", 10_000.0, 20_000.0), {"ph": "s", "id": 3, "name": "fwdbwd", "pid": PID}
    kernel = ranged("gemm", 12_000.0, 13_000.0, cat="kernel", tid=7) | {"pid": 0}
    labels = {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}}
    events = (step, arrow | {"tid": PID, "ts": 11_000.0}, labels, kernel)
    zero = rewritten(tmp_path, recording(*events), rank=0)
    one = rewritten(tmp_path, recording(*events) | {"baseTimeNanoseconds": BASE_NS + 2_000_000}, rank=1)
    out = tmp_path / "trace.json.gz"

    merge_traces([zero, one], out, {1: 0.005})

    trace = read(out)
    assert trace["baseTimeNanoseconds"] == BASE_NS
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0", "rank 0 GPU 0", "rank 1", "rank 1 GPU 0"]
    starts = {(names[event["pid"]], event["name"]): event["ts"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert starts == {
        ("rank 0", "ProfilerStep#3"): 10_000.0,
        ("rank 0 GPU 0", "gemm"): 12_000.0,
        ("rank 1", "ProfilerStep#3"): 7_000.0,
        ("rank 1 GPU 0", "gemm"): 9_000.0,
    }
    arrows = [event["id"] for event in trace["traceEvents"] if event["ph"] == "s"]
    assert len(set(arrows)) == 2


def test_of_no_traces_nothing_is_made(tmp_path: Path) -> None:
    merge_traces([], tmp_path / "trace.json.gz", {})
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_leaves_no_half_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gzip.GzipFile, "write", full)
    with pytest.raises(OSError, match="No space left"):
        rewritten(tmp_path, recording())

    assert [path.name for path in tmp_path.iterdir()] == ["recorded.json"]
