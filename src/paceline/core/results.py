"""What a run amounts to: `result.json`, the contract between the trainer and everything that reads it later."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, PlainSerializer

SCHEMA_VERSION = 1
Status = Literal["completed", "target_reached", "preempted", "failed"]


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


# JSON has no infinity and no NaN: they are written as text, which reads back as the same number.
Loss = Annotated[float, PlainSerializer(_json_number, return_type=float | str, when_used="json")]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EvalResult(_Value):
    """An evaluation: how many images were counted, and the shares and mean loss over exactly those."""

    images: int
    top1: float
    top5: float
    loss: Loss


class ThroughputResult(_Value):
    """Global images/s in steady state, waiting for data included.

    `spread` is the 10th and 90th percentile of images/s over `n` windows of up to ten steps; `excluded_s` is what
    was left out: warm-up steps, evaluations and checkpoints.
    """

    images_per_s: float
    spread: tuple[float, float]
    n: int
    excluded_s: float


class TimeResult(_Value):
    """Seconds: the whole run, and its parts. `to_target_s` is None when no target was set or reached.

    `startup_s` runs from the start of the process to the first step; `to_target_s` from there to the end of the
    evaluation that met the target.
    """

    wall_s: float
    startup_s: float
    train_s: float
    eval_s: float
    checkpoint_s: float
    to_target_s: float | None


class StageResult(_Value):
    """Seconds of one stage over all counted steps, by the host's clock and the device's; share of the wall clock."""

    host_s: float
    device_s: float
    share: float


class RunResult(_Value):
    """A finished run. `eval` is the last evaluation, None when the recipe asked for none."""

    schema_version: int = SCHEMA_VERSION
    status: Status
    recipe_hash: str
    world_size: int
    epochs: float
    steps: int
    images_seen: int
    eval: EvalResult | None
    best: EvalResult | None
    throughput: ThroughputResult
    time: TimeResult
    stages: dict[str, StageResult]
    verdict: dict[str, str]
    lr: str
    weights_sha256: str
    provenance: dict[str, Any]
