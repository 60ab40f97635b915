"""What a sweep came to: one setting of a recipe at several values, and how fast each was."""

from typing import Any, Literal

from pydantic import Field

from paceline.core.interval import Interval
from paceline.core.value import MeasuredFloat, ResultModel


class SweepPoint(ResultModel):
    """A value, as it is written in `patch`, and what was measured with it.

    `images_per_s` is the mean over runs, all ranks together, and `spread` the lowest and the highest of them; of one
    run the 10th and 90th percentile of its windows, None where it had one of them. `step_s` is a step at that speed and
    `epoch_s` an epoch of training alone. `stages` are rank 0's device seconds of a step, and `data_wait_s` the one that
    waits. `is_fastest` holds for the highest speed and for those whose spread overlaps with its. `error` says why
    nothing was measured, and `starved` in how many of the runs other processes held the cores, "" where in none. `runs`
    are folders below the experiment's.
    """

    value: str
    patch: tuple[str, ...]
    batch_size: int | None = None
    images_per_s: Interval | None = None
    spread: tuple[MeasuredFloat, MeasuredFloat] | None = None
    is_fastest: bool = False
    step_s: MeasuredFloat | None = None
    data_wait_s: MeasuredFloat | None = None
    epoch_s: MeasuredFloat | None = None
    stages: dict[str, MeasuredFloat] = Field(default_factory=dict)
    bottleneck: str = ""
    starved: str = ""
    error: str = ""
    runs: tuple[str, ...] = ()


class SweepResult(ResultModel):
    """The speed of a recipe over the values of one field, `key`, each measured in `repeats` short runs, in turns.

    `steps` are the counted steps of a run. `fastest` is the value with the highest speed and `sentence` says which are
    not to be told from it. `wall_s` is that of all runs that have ended well.
    """

    kind: Literal["sweep"] = "sweep"
    schema_version: int = 1
    key: str
    recipe: str
    recipe_hash: str
    ranks: int
    steps: int
    warmup_steps: int
    repeats: int
    points: tuple[SweepPoint, ...]
    fastest: str
    sentence: str
    wall_s: MeasuredFloat
    command: tuple[str, ...]
    provenance: dict[str, Any]
