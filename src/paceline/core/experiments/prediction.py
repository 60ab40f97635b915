"""What is said of ranks that were not measured."""

from typing import Any, Literal

from pydantic import Field

from paceline.core.value import Measured, Value


class Predicted(Value):
    """A number of ranks that was not measured: seconds for `images` images, and between which they are likely to lie.

    Of a table, `low_s` and `high_s` are meant for 95 % confidence; of a run they are a likely range. `efficiency` is
    that of whole runs, the time of one rank over N times that of N, with the start-up of both. `step_s` is a step, and
    `parts` what it and the fixed cost are made of: seconds of the whole run by name; `dominates` names the largest of
    them that is no computing. `gpu_hours` are ranks times hours, `cost` those times the price of an hour (None without
    one).
    """

    ranks: int
    nodes: int
    rank_batch: int
    images: Measured
    time_s: Measured
    low_s: Measured
    high_s: Measured
    step_s: Measured
    images_per_s: Measured
    efficiency: Measured
    gpu_hours: Measured
    cost: Measured | None = None
    parts: dict[str, Measured] = Field(default_factory=dict)
    dominates: str = ""


class MeasuredPoint(Value):
    """A point that the prediction rests on: what was measured, and what the fitted form says of it."""

    ranks: int
    nodes: int
    rank_batch: int
    images: Measured
    time_s: Measured
    fitted_s: Measured


class PredictionResult(Value):
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
    terms: dict[str, Measured]
    points: tuple[MeasuredPoint, ...] = ()
    predictions: tuple[Predicted, ...]
    network: str = ""
    notes: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    provenance: dict[str, Any] = Field(default_factory=dict)
