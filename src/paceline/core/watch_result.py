"""Result of `paceline watch`, as written to `result.json` of its folder."""

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError

from paceline.core.errors import PacelineError
from paceline.core.json_file import MeasuredFloat, ResultModel, read_json
from paceline.core.results import CommunicationResult, CpuResult, RankResult, StageResult, StragglerResult

RECORDS: Final = "watch"
"""Subfolder of the records of each process, which marks the folder of a watched command."""
RESULT: Final = "result.json"


class WatchedPause(ResultModel):
    """A pause in `unix_s`, seconds since 1970, of `pause_s` seconds."""

    name: str
    unix_s: float
    pause_s: float


class RankTimeline(ResultModel):
    """When a rank started, took its first step and ended, in seconds since 1970, and its longest pauses.

    `is_killed`: the process wrote no end.
    """

    rank: int
    host: str
    started_s: float
    trained_from_s: float
    ended_s: float
    is_killed: bool
    pauses: tuple[WatchedPause, ...] = ()


class StepPoint(ResultModel):
    """Means over some steps of rank 0, in seconds per step; `step` is the last of them."""

    step: int
    step_s: float
    data_wait_s: float
    exposed_s: float


class WatchResult(ResultModel):
    """Where the time of a training script went; a result without steps has `steps` 0 and `notes` that say why.

    Times are those of rank 0 in seconds. `step_s` is the mean of the `measured_steps`, without pauses, that follow
    `warmup_steps`, of more than 20,000 steps only the last; `step_spread` has its 10th and 90th percentile. `stages`
    are sums over the measured steps.
    `attributed` is the share of the measured steps in stages other than `other`. `wall_s` is the whole process:
    `start_up_s`, `steps_s` (all steps, without pauses), `pauses` by name, and a rest. `num_pauses` counts them.
    `setup` has the versions, environment, hardware, code and settings of rank 0 as text by dotted name. `first_losses`
    and `last_losses` are those of up to 32 of its steps. `cpu` is of the whole command with all processes on rank 0's
    host; None if the kernel does not report how long threads wait.
    `verdict` is as in a run's result: bottleneck, evidence, ceiling, and what to try in a sentence.
    """

    schema_version: Literal[1] = 1
    kind: Literal["watch"] = "watch"
    paceline: str
    command: tuple[str, ...]
    exit_code: int
    framework: str = ""
    torch: str = ""
    python: str = ""
    hosts: tuple[str, ...] = ()
    threads: int = 0
    world_size: int = 0
    steps: int = 0
    warmup_steps: int = 0
    measured_steps: int = 0
    step_s: float = 0.0
    step_spread: tuple[float, float] = (0.0, 0.0)
    samples_per_s: float | None = None
    memory_bytes: int | None = None
    has_gpu: bool = False
    stages: dict[str, StageResult] = Field(default_factory=dict)
    attributed: float = 0.0
    wall_s: float = 0.0
    start_up_s: float = 0.0
    steps_s: float = 0.0
    pauses: dict[str, float] = Field(default_factory=dict)
    num_pauses: dict[str, int] = Field(default_factory=dict)
    verdict: dict[str, str]
    communication: CommunicationResult | None = None
    straggler: StragglerResult | None = None
    ranks: tuple[RankResult, ...] = ()
    notes: tuple[str, ...] = ()
    timeline: tuple[RankTimeline, ...] = ()
    curve: tuple[StepPoint, ...] = ()
    setup: dict[str, str] = Field(default_factory=dict)
    first_losses: tuple[MeasuredFloat, ...] = ()
    last_losses: tuple[MeasuredFloat, ...] = ()
    cpu: CpuResult | None = None


def is_watch_dir(path: Path) -> bool:
    """Return whether `path` is the folder of a watched command, finished or not."""
    try:
        return (path / RECORDS).is_dir()
    except OSError:
        return False


def read_watch_result(path: Path) -> WatchResult:
    """Read the result of the folder `path`. Raise `PacelineError` if it is missing or damaged."""
    file = path / RESULT
    try:
        values: Any = read_json(file)
        return WatchResult.model_validate(values)
    except FileNotFoundError:
        raise PacelineError(f"{path}: has no result.json: the watched command has not ended, or paceline was killed "
                            "(name another)") from None  # fmt: skip
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise PacelineError(f"{file}: is not a result of paceline watch: {place}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise PacelineError(f"{file}: cannot be read: {error} (name another)") from None
