"""A finished run's result with every part filled in."""

import pytest

from paceline.core.results import EvalResult, RunResult, StageResult, ThroughputResult, TimeResult


@pytest.fixture
def result() -> RunResult:
    evaluation = EvalResult(images=359, top1=0.98, top5=1.0, loss=0.125)
    return RunResult(
        status="target_reached",
        recipe_hash="0123456789ab",
        world_size=2,
        epochs=1.5,
        steps=33,
        images_seen=2112,
        eval=evaluation,
        best=evaluation,
        throughput=ThroughputResult(images_per_s=1000.5, spread=(900.0, 1100.0), n=3, excluded_s=0.5),
        time=TimeResult(wall_s=4.0, startup_s=1.0, train_s=2.0, eval_s=0.5, checkpoint_s=0.25, to_target_s=3.0),
        stages={"forward": StageResult(host_s=1.0, device_s=0.5, share=0.25)},
        verdict={"bottleneck": "compute", "evidence": "forward 25 %", "try": "train.precision=bf16"},
        lr="0.1 (batch 128, no scaling), no warm-up",
        weights_sha256="ab" * 32,
        provenance={"command": ["paceline", "train"], "torch": "2.11"},
    )
