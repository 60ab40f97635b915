"""What tuning came to: settings that were tried, and those that won."""

from typing import Any, Literal

from pydantic import Field

from paceline.core.experiments.ladder import ParityResult
from paceline.core.interval import Interval
from paceline.core.value import MeasuredFloat, ResultModel


class TriedResult(ResultModel):
    """Settings that were tried: `patch` are the KEY=VALUE words over the best known when they were, which `over` names.

    `ratio` is their speed over that of `over`, in pairs of runs (or, where there was one short run alone, without
    bounds). `round` counts from 1, `steps` are those of its longest run and `trials` how many runs it took.
    `status`: `won`, `lost`, `no_gain` (not to be told from 1), `differs` (trains to another loss), `no_room` (out of
    memory), `failed`, `starved` (other processes held the cores meanwhile, so that nothing is known). `explains` says
    in a few words what they change; `parity` is None where losses were not compared.
    """

    name: str
    patch: tuple[str, ...]
    over: str
    round: int
    steps: int
    trials: int
    images_per_s: MeasuredFloat | None
    ratio: Interval | None
    status: Literal["won", "lost", "no_gain", "differs", "no_room", "failed", "starved"]
    why: str
    runs: tuple[str, ...] = ()
    explains: str = ""
    parity: ParityResult | None = None


class TuneResult(ResultModel):
    """The fastest settings that were found, and all that were tried on the way.

    `first` and `best` are images/s of the recipe as it was and of the tuned one, `gain` their ratio in pairs of runs.
    `best_patch` is what is changed, `recipe_file` where the tuned recipe was written, `trials` how many runs it all
    took, `grid` how many settings there are in the space that was searched, and `stopped` why the search ended.
    `first_verdict` and `verdict` say what held the recipe back, and what holds the tuned one back.
    """

    kind: Literal["tune"] = "tune"
    schema_version: int = 1
    recipe: str
    recipe_hash: str
    ranks: int
    steps: int
    warmup_steps: int
    repeats: int
    first: Interval
    best: Interval
    gain: Interval | None
    best_patch: tuple[str, ...]
    recipe_file: str
    tried: tuple[TriedResult, ...]
    trials: int
    grid: int
    stopped: str
    wall_s: MeasuredFloat
    command: tuple[str, ...]
    provenance: dict[str, Any]
    first_verdict: dict[str, str] = Field(default_factory=dict)
    verdict: dict[str, str] = Field(default_factory=dict)
