"""Traces of a training loop agree with the clock and can be read by other tools.

HolisticTraceAnalysis is no dependency of the tests, because it installs JupyterLab. To run its test: `pip install
--no-deps HolisticTraceAnalysis && pip install pandas plotly networkx pydot psutil pyyaml`.
"""

import gzip
import json
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.measure import ClockSummary, StageClock
from paceline.measure.chrome_trace import merge_traces, trace_totals
from paceline.measure.profiler import MarkedClock, TraceMarks

WARMUP_STEPS = 3
NUM_TRACED = 4
WORLD_SIZE = 3
STAGES = {"data_wait", "forward", "loss", "backward", "exposed_communication", "optimizer"}
TOLERANCE = 0.05
"""Relative tolerance of a stage's seconds.

A trace includes the cost of opening a span, some 0.1 ms of 8 ms and more. Another process may occupy the core during a
stage, so the smallest difference of all ranks counts.
"""


@dataclass(frozen=True)
class Traced:
    """A rank's trace, and the clock's times of the same steps."""

    path: Path
    summary: ClockSummary

    @property
    def clock_s(self) -> dict[str, float]:
        """Seconds of each stage in the traced steps, after the measurement warm-up."""
        return {stage: sum(step_s[:NUM_TRACED]) for stage, step_s in self.summary.recent.items()}


def batches(num_steps: int) -> Iterator[torch.Tensor]:
    for _ in range(num_steps):
        images = torch.randn(32, 8, 32, 32)
        for _ in range(24):
            images = images.sin()
        yield images


def trace_loop(path: Path, rank: int) -> Traced:
    """Train a model for some steps; the last gradient of backward triggers work of its own, like a DDP hook."""
    model = nn.Sequential(*(nn.Conv2d(8, 8, 5, padding=2) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bare = StageClock(warmup_steps=WARMUP_STEPS)
    spans = TraceMarks(
        path, first_step=WARMUP_STEPS, num_steps=NUM_TRACED, rank=rank, world_size=WORLD_SIZE, warn=pytest.fail
    )
    clock = MarkedClock(bare, spans)

    def last_gradient(weight: torch.Tensor) -> None:
        clock.switch_stage("exposed_communication")
        for _ in range(2):
            torch.randn(32, 8, 32, 32).sin()

    model[0].weight.register_post_accumulate_grad_hook(last_gradient)
    for images in clock.batches(batches(WARMUP_STEPS + NUM_TRACED + 1)):
        with clock.stage("forward"):
            maps = model(images)
        with clock.stage("loss"):
            loss = sum(maps.square().mean() for _ in range(64))
        with clock.stage("backward"):
            loss.backward()
        with clock.stage("optimizer"):
            for _ in range(60):
                optimizer.step()
            optimizer.zero_grad()
        clock.end_step(images=len(images))
    spans.finish()
    return Traced(path, bare.drain())


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> list[Traced]:
    """Return the traces of three ranks, recorded one after the other, in a folder without other files."""
    folder = tmp_path_factory.mktemp("run") / "trace"
    traced = [trace_loop(folder / f"rank{rank}.json.gz", rank) for rank in range(WORLD_SIZE)]
    assert len(list(folder.iterdir())) == WORLD_SIZE
    return traced


def events_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def differences(one_s: Mapping[str, float], other_s: Mapping[str, float]) -> dict[str, float]:
    assert set(one_s) == set(other_s) == STAGES
    return {stage: abs(one_s[stage] / other_s[stage] - 1) for stage in STAGES}


def test_stage_durations_of_a_trace_agree_with_the_clock(traced: list[Traced]) -> None:
    errors_of_ranks = [differences(trace_totals(each.path), each.clock_s) for each in traced]
    smallest = {stage: min(each[stage] for each in errors_of_ranks) for stage in STAGES}
    assert all(difference < TOLERANCE for difference in smallest.values()), errors_of_ranks


def test_events_of_a_thread_are_nested(traced: list[Traced], tmp_path: Path) -> None:
    """Perfetto drops events that are not nested. Kineto rounds both ends to 1 ns, so neighbors may overlap by 2 ns."""
    merged = tmp_path / "trace.json.gz"
    merge_traces([each.path for each in traced], merged, {})
    for path in (*(each.path for each in traced), merged):
        threads = defaultdict(list)
        for event in events_of(path):
            if event["ph"] == "X":
                threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
        assert len(threads) >= 2
        for ranges in threads.values():
            open_until: list[float] = []
            for start, minus_duration in sorted(ranges):
                while open_until and open_until[-1] <= start + 0.002:
                    open_until.pop()
                assert not open_until or start - minus_duration <= open_until[-1] + 0.002
                open_until.append(start - minus_duration)


def test_a_trace_has_the_names_of_operators(traced: list[Traced]) -> None:
    """The names are those of `emit_nvtx`; `zero_grad` is one of them, within the optimizer stage."""
    events = [event for event in events_of(traced[0].path) if event["ph"] == "X"]
    named = {event["name"] for event in events}
    assert {"aten::conv2d", "aten::convolution_backward", "Optimizer.zero_grad#SGD.zero_grad"} <= named
    stages = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == "optimizer"]
    cleared = [event["ts"] for event in events if event["name"].startswith("Optimizer.zero_grad")]
    assert cleared
    assert all(any(start <= moment <= end for start, end in stages) for moment in cleared)


def test_merged_ranks_share_a_time_axis(traced: list[Traced], tmp_path: Path) -> None:
    """One process was all ranks, one after the other."""
    merged = tmp_path / "trace.json.gz"
    merge_traces([each.path for each in traced], merged, {})

    events = events_of(merged)
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    steps = [
        sorted(
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event["name"].startswith("ProfilerStep#") and event["pid"] == names[f"rank {rank}"]
        )
        for rank in range(WORLD_SIZE)
    ]

    assert [len(each) for each in steps] == [NUM_TRACED] * WORLD_SIZE
    assert all(end <= start for (_, end), (start, _) in pairwise(steps[0] + steps[1]))


def test_holistic_trace_analysis_reads_a_trace_folder(traced: list[Traced]) -> None:
    """It rounds both ends to whole microseconds: at most 0.1 % of a stage, each of which takes 2 ms or more."""
    hta = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed (see above)")
    with warnings.catch_warnings(action="ignore"):
        analysis = hta.TraceAnalysis(trace_dir=str(traced[0].path.parent), include_last_profiler_step=True)

    assert sorted(analysis.t.get_ranks()) == list(range(WORLD_SIZE))
    symbols = analysis.t.symbol_table.sym_table
    for rank, each in enumerate(traced):
        rows = analysis.t.get_trace(rank)
        named = rows.assign(name=[symbols[index] for index in rows["name"]])
        steps = [name for name in named["name"] if name.startswith("ProfilerStep#")]
        in_steps = named[(named["tid"] == 0) & (named["iteration"] >= 0) & named["name"].isin(STAGES)]
        stages_s = (in_steps.groupby("name")["dur"].sum() / 1e6).to_dict()
        assert len(steps) == NUM_TRACED
        assert max(differences(stages_s, trace_totals(each.path)).values()) < 2e-3
