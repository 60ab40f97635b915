"""Result of `paceline why`: the gap between two runs, and the differences that may explain it."""

from typing import Literal

from paceline.core.json_file import MeasuredFloat, ResultModel
from paceline.core.statistics import Interval

Verdict = Literal["slower", "faster", "same", "unknown"]
Outcome = Literal["worse", "better", "same", "unknown"]


class Difference(ResultModel):
    """A recorded fact in which two runs differ, as text; None where a run lacks it."""

    name: str
    a: str | None
    b: str | None


class Cause(ResultModel):
    """A difference that may explain a gap.

    `score`, 0 to 1, is the share of the gap in the `stages` that the difference affects, times how plausible its
    direction is. `reason` is a sentence.
    """

    difference: Difference
    score: float
    stages: tuple[str, ...]
    reason: str


class PartGap(ResultModel):
    """Seconds of a stage or a pause per unit of both runs, and its share of the whole gap."""

    name: str
    a_s: float
    b_s: float
    share: float


class SpeedGap(ResultModel):
    """The time of run B over that of A, per `unit`, with pauses; `ratio` has the interval of the steps.

    `verdict` says what B is: `same` if the interval, widened by what runs of one setting differ by, includes 1. `parts`
    have the largest gap first.
    """

    verdict: Verdict
    unit: Literal["sample", "step"]
    a_s: float
    b_s: float
    ratio: Interval
    parts: tuple[PartGap, ...]


class OutcomeGap(ResultModel):
    """How both runs ended: `metric` is `top1` or `loss`, `gap` is B minus A.

    `first_step` is the first at which their losses differ, None if they never do or were not recorded for all steps.
    """

    verdict: Outcome
    metric: str
    a: MeasuredFloat
    b: MeasuredFloat
    gap: Interval
    first_step: int | None = None


class RerunRow(ResultModel):
    """Run A with one difference put back, over A: the ratio of step times in `pairs`, and its share of the gap.

    `differences` are the names that were put back together. `error` is why it could not be measured.
    """

    differences: tuple[str, ...]
    ratio: Interval | None = None
    share: float | None = None
    error: str = ""


class RerunResult(ResultModel):
    """The gap as measured again: `whole` is B over A with all that can be put back, then a row per difference.

    `left` are the differences that cannot be put back, such as versions and hardware.
    """

    pairs: int
    steps: int
    whole: RerunRow
    rows: tuple[RerunRow, ...]
    left: tuple[str, ...]


class WhyResult(ResultModel):
    """Why run B is slower or ends worse than run A; `a` and `b` are their folders.

    `causes` explain the speed and `outcome_causes` how they ended, the likeliest first. `also_different` are all
    other differences.
    """

    kind: Literal["why"] = "why"
    schema_version: Literal[1] = 1
    paceline: str
    a: str
    b: str
    speed: SpeedGap | None
    causes: tuple[Cause, ...]
    outcome: OutcomeGap | None
    outcome_causes: tuple[Cause, ...]
    also_different: tuple[Difference, ...]
    notes: tuple[str, ...] = ()
    rerun: RerunResult | None = None
