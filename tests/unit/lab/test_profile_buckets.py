"""An instrumented run adds bucket timings to the base's communication, and a check of its trace."""

import gzip
import json
from pathlib import Path

import pytest

from paceline.core.results import (
    AccountResult,
    BucketResult,
    CommunicationResult,
    RunResult,
    StageResult,
    ThroughputResult,
    TimeResult,
)
from paceline.lab.profile import compute_trace_share, merge_bucket_timings
from paceline.recipe.load import Patch, load

DIGITS = load("digits").recipe
NO_WARMUP = load("digits", Patch.parse(["measure.warmup_steps=1"])).recipe
PLAIN = CommunicationResult(exposed_s=0.003, share=0.15)
TIMED = CommunicationResult(
    exposed_s=0.004,
    share=0.12,
    bytes=45_000_000,
    wire_s=0.01,
    overlap=0.6,
    buckets=(BucketResult(bytes=45_000_000, ready_s=0.0, wire_s=0.01, n=40),),
)


def result(found: CommunicationResult | None = None, counted_steps: int = 40) -> RunResult:
    account = {"wall_s": 4.0, "start_up_s": 1.0, "compile_s": 0.0, "warmup_s": 1.0, "stages_s": 2.0, "pauses": {}}
    account |= {"counted_steps": counted_steps, "finish_s": 0.0, "residual_s": 0.0, "explained": 1.0}
    return RunResult(
        status="completed",
        recipe_hash="0123456789ab",
        world_size=2,
        epochs=1.0,
        steps=50,
        images_seen=3200,
        eval=None,
        best=None,
        throughput=ThroughputResult(images_per_s=1.0, spread=(1.0, 1.0), n=4, excluded_s=0),
        time=TimeResult(wall_s=4.0, startup_s=1.0, train_s=2.0, eval_s=0, checkpoint_s=0, to_target_s=None),
        stages={
            "forward": StageResult(host_s=1.5, device_s=1.5, share=0.75),
            "h2d": StageResult(host_s=0.5, device_s=0.5, share=0.25),
        },
        account=AccountResult.model_validate(account),
        communication=found,
        verdict={},
        lr="0.1 at 64",
        weights_sha256="ab",
        provenance={},
    )


def test_buckets_of_the_run_aside_stand_beside_what_the_base_waits_for() -> None:
    """The base's step is not slowed down by a hook for each bucket."""
    found = merge_bucket_timings(result(PLAIN), result(TIMED))
    assert found is not None
    assert (found.exposed_s, found.share) == (PLAIN.exposed_s, PLAIN.share)
    assert (found.bytes, found.wire_s, found.overlap, found.buckets) == (45_000_000, 0.01, 0.6, TIMED.buckets)


@pytest.mark.parametrize("aside", [None, result(None), result(PLAIN)])
def test_without_buckets_what_the_base_waits_for_is_all(aside: RunResult | None) -> None:
    assert merge_bucket_timings(result(PLAIN), aside) == PLAIN


def test_a_base_that_averages_nothing_has_no_communication() -> None:
    assert merge_bucket_timings(result(None), result(TIMED)) is None


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace of one step: 1.5 s of forward, 0.3 s of copying, and an evaluation, which is no stage."""

    def event(name: str, start_s: float, length_s: float) -> str:
        times = {"ts": start_s * 1e6, "dur": length_s * 1e6}
        return json.dumps({"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 0, "name": name, **times})

    stages = (("ProfilerStep#10", 0.0, 4.0), ("h2d", 0.1, 0.3), ("forward", 0.5, 1.5), ("evaluate", 2.0, 1.0))
    path = tmp_path / "rank0.json.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"traceEvents": [\n' + ",\n".join(event(*stage) for stage in stages) + "\n]}\n")
    return path


def test_stages_of_a_trace_are_compared_with_those_of_the_clock(trace: Path) -> None:
    """1.8 s of 2 s."""
    assert compute_trace_share(trace, result(), DIGITS.measure.warmup_steps, 40) == pytest.approx(0.9, rel=1e-12)


def test_a_trace_of_other_steps_than_those_that_were_counted_is_not_compared(trace: Path) -> None:
    """A shorter one, and one that began later as the profiler had to warm up."""
    assert compute_trace_share(trace, result(), DIGITS.measure.warmup_steps, 39) is None
    assert compute_trace_share(trace, result(), NO_WARMUP.measure.warmup_steps, 40) is None


def test_without_a_trace_nothing_is_compared(tmp_path: Path) -> None:
    assert compute_trace_share(tmp_path / "rank0.json.gz", result(), DIGITS.measure.warmup_steps, 40) is None
