"""What is said of ranks that were not measured."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from pydantic import Field

from paceline.core.value import MeasuredFloat, ResultModel


class Predicted(ResultModel):
    """A number of ranks that was not measured: seconds for `images` images, and between which they are likely to lie.

    Of a table, `low_s` and `high_s` are meant for 95 % confidence; of a run they are a likely range. `efficiency` is
    that of whole runs, the time of one rank over N times that of N, with the start-up of both, and `speedup` is N times
    it (None in results that were written before it was there). `step_s` is a step, and
    `parts` what it and the fixed cost are made of: seconds of the whole run by name; `dominates` names the largest of
    them that is no computing. `gpu_hours` are ranks times hours, `cost` those times the price of an hour (None without
    one).
    """

    ranks: int
    nodes: int
    rank_batch: int
    images: MeasuredFloat
    time_s: MeasuredFloat
    low_s: MeasuredFloat
    high_s: MeasuredFloat
    step_s: MeasuredFloat
    images_per_s: MeasuredFloat
    efficiency: MeasuredFloat
    speedup: MeasuredFloat | None = None
    gpu_hours: MeasuredFloat
    cost: MeasuredFloat | None = None
    parts: dict[str, MeasuredFloat] = Field(default_factory=dict)
    dominates: str = ""


class MeasuredPoint(ResultModel):
    """A point that the prediction rests on: what was measured, and what the fitted form says of it.

    `efficiency` is images/s per rank over that of the point with the fewest ranks (the first of those in the table), of
    whole runs with their start-up, and `speedup` is ranks times it. `fitted_efficiency` is the fitted time of one rank
    over N times that of N. All three are None in results that were written before they were there.
    """

    ranks: int
    nodes: int
    rank_batch: int
    images: MeasuredFloat
    time_s: MeasuredFloat
    fitted_s: MeasuredFloat
    efficiency: MeasuredFloat | None = None
    speedup: MeasuredFloat | None = None
    fitted_efficiency: MeasuredFloat | None = None


class PredictionResult(ResultModel):
    """Predictions, and what they rest on.

    `basis` is `points` (a table of times) or `run` (a profile and a network). `form` is the formula in words, `terms`
    its coefficients: seconds by name. `network` names what collectives were reckoned with. `notes` say what the points
    leave open, such as a term that none of them can tell.
    """

    kind: Literal["prediction"] = "prediction"
    schema_version: int = 1
    basis: Literal["points", "run"]
    source: str
    form: str
    terms: dict[str, MeasuredFloat]
    points: tuple[MeasuredPoint, ...] = ()
    predictions: tuple[Predicted, ...]
    network: str = ""
    notes: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    provenance: dict[str, Any] = Field(default_factory=dict)

    @property
    def is_of_speeds(self) -> bool:
        """Whether the points are speeds: the images of one and the same time, which has no start-up in it."""
        return are_speeds(self.points)

    @property
    def has_several_images(self) -> bool:
        """Whether not all times are of the same number of images; speeds are those of any number."""
        measured = set() if self.is_of_speeds else {point.images for point in self.points}
        return len(measured | {each.images for each in self.predictions}) > 1

    @property
    def start_up_s(self) -> float | None:
        """The seconds of a run that do not depend on its images, by the fit; None where the points do not tell."""
        return self.terms.get("f_s") if self.basis == "points" else None

    def time_of(self, point: MeasuredPoint) -> float:
        """Return the seconds that a point took: of a speed, those that it needs for the images that are predicted."""
        if not self.is_of_speeds or not self.predictions:
            return point.time_s
        return point.time_s * self.predictions[0].images / point.images


class _TimedPoint(Protocol):
    @property
    def images(self) -> float: ...

    @property
    def time_s(self) -> float: ...


def are_speeds(points: Sequence[_TimedPoint]) -> bool:
    """Return whether points are speeds: images of the same time."""
    return len({point.time_s for point in points}) == 1 and len({point.images for point in points}) > 1
