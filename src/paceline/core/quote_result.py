"""Result of `paceline quote`, and a quote compared with the run that it was for."""

import math
from collections.abc import Callable
from typing import Any, Final, Literal

from pydantic import Field

from paceline.core.json_file import MeasuredFloat, ResultModel
from paceline.core.statistics import Interval
from paceline.core.units import duration

Pricing = Literal["", "on demand", "spot"]
Verdict = Literal["", "yes", "likely", "unlikely", "no"]
VERDICTS: Final[tuple[Verdict, ...]] = ("", "yes", "likely", "unlikely", "no")
"""From the best to the worst; "" without a limit."""
PARTS: Final = ("steps", "evaluation", "checkpoints", "failures")


def format_limits(by_hours: float | None, budget: float | None, currency: str) -> tuple[str, str]:
    """Return the limits as `20 min` and `USD 15.05`, "" for one that is not set."""
    time = "" if by_hours is None else duration(3600 * by_hours).removesuffix(" 00 s").removesuffix(" 00 min")
    return time, "" if budget is None else f"{currency} {budget:,.12g}"


def format_hours(hours: float) -> str:
    """Return `9 h 05 min`, or `never` for infinite hours."""
    return duration(3600 * hours) if math.isfinite(hours) else "never"


def format_range(interval: Interval, write: Callable[[float], str]) -> str:
    """Return `190 to 240`, `190 or more` without an upper bound, and "" without any."""
    if interval.low is None or interval.high is None or not math.isfinite(interval.low):
        return ""
    if not math.isfinite(interval.high):
        return f"{write(interval.low)} or more"
    return f"{write(interval.low)} to {write(interval.high)}"


class QuotedPlan(ResultModel):
    """A way to train: `ranks` GPUs of a kind on `nodes`, on demand or on spot ("" without prices).

    Intervals have 90 % confidence. `gpu` is its name in `--gpu`, `device` the one that torch reports. `image_size` is
    in pixels. `images_per_s` is what the GPUs and the data path give together. `hours` is the expected time of all
    `parts`, which hold the hours of each at the most likely speed; it is infinite if failures leave less
    than a hundredth of it to train. `is_cut_short` says that `train.max_time` ends the run before its last step.
    `largest_micro_batch` is how many images of a rank fit into memory at once, 0 for none.
    `data_images_per_s` is what the data path of a node must give so that no GPU waits in a training step, and
    `waits_for_data` says that it does not; evaluations, which read faster, may wait. `ends_in_time` and
    `is_within_budget` are "" if no limit was set.
    """

    gpu: str
    device: str
    ranks: int
    nodes: int
    pricing: Pricing
    rank_batch: int
    image_size: int
    total_steps: int
    images_per_s: Interval
    hours: Interval
    parts: dict[str, MeasuredFloat]
    is_cut_short: bool = False
    data_images_per_s: float
    waits_for_data: bool
    memory_bytes: float
    fits: bool
    largest_micro_batch: int
    cost: Interval | None
    ends_in_time: Verdict = ""
    is_within_budget: Verdict = ""


class QuoteResult(ResultModel):
    """Quotes and plans for a recipe.

    `work_hash`, `work` and `pauses` are `Recipe.work_hash`, `work_values` and `pause_values`. `quotes` has speed and
    memory of a step on each GPU and number of ranks, `plans` whole runs. `chosen` is the index of the plan that
    `answer` names first, None if there is none. `assumptions` are
    facts by name; `by_hours` and `budget` the limits that were set.
    """

    recipe: str
    recipe_hash: str
    work_hash: str
    work: dict[str, Any] = Field({})
    pauses: dict[str, Any] = Field({})
    constants: str
    notes: tuple[str, ...]
    quotes: tuple[dict[str, Any], ...]
    plans: tuple[QuotedPlan, ...]
    answer: str
    chosen: int | None
    assumptions: dict[str, str]
    currency: str = ""
    prices_date: str = ""
    by_hours: float | None = None
    budget: float | None = None
    command: tuple[str, ...] = ()
    paceline: str = ""


class QuoteTruth(ResultModel):
    """A quote against the run that it was for, on rank 0.

    `why` is a sentence on what could not be compared, "" if all was. `gpu` is the quote's GPU, "" without a quote for
    `device` and the run's `ranks`. `images_per_s` and `hours` are quoted, with 90 % intervals. `measured_images_per_s`
    is that of the steady state, `measured_hours` of all processes without the start-up of the first, which a quote has
    not; None for a run that did not train all of its steps.
    """

    device: str
    ranks: int
    gpu: str = ""
    images_per_s: Interval | None = None
    hours: Interval | None = None
    measured_images_per_s: float | None = None
    measured_hours: float | None = None
    why: str = ""

    @property
    def is_speed_within(self) -> bool | None:
        """Whether the measured images/s are in the interval; None if either is unknown."""
        return _is_within(self.measured_images_per_s, self.images_per_s)

    @property
    def is_time_within(self) -> bool | None:
        """Whether the measured time is in the interval; None if either is unknown."""
        return _is_within(self.measured_hours, self.hours)


def _is_within(value: float | None, interval: Interval | None) -> bool | None:
    if value is None or interval is None or interval.low is None or interval.high is None:
        return None
    return interval.low <= value <= interval.high
