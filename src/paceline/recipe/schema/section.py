"""The base of every recipe section, and the types that several sections share."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from paceline.core.units import TIME_UNITS, TRAINING_UNITS, Duration, Unit

Auto = Literal["auto"]
Off = Literal["off"]
Switch = Literal["on", "off"]


class Section(BaseModel):
    """A frozen part of a recipe. Unknown keys are errors; a docstring under a field is its documentation."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


def refuse(path: str, message: str) -> NoReturn:
    """Raise the error of a validator over several sections, about the field at `path`."""
    raise PydanticCustomError("refused", "{message}", {"path": path, "message": message})


def _parse(value: object, units: Sequence[Unit] = TRAINING_UNITS + TIME_UNITS) -> Duration:
    return value if isinstance(value, Duration) else Duration.parse(value, units)


def _parse_training(value: object) -> Duration:
    duration = _parse(value, TRAINING_UNITS)
    if duration.is_time:
        raise ValueError(f"'{duration}' is wall-clock time, which differs between machines (use ep, st, img or %)")
    return duration


def _parse_cadence(value: object) -> Duration:
    duration = _parse_training(value)
    if duration.value == 0:
        raise ValueError(f"'{duration}' never comes round (use 1st for every step)")
    return duration


def _parse_save_cadence(value: object) -> Duration:
    duration = _parse(value)
    return _parse_time(duration) if duration.is_time else _parse_cadence(duration)


def _parse_time(value: object) -> Duration:
    duration = _parse(value, TIME_UNITS)
    if not duration.is_time or duration.seconds <= 0:
        raise ValueError(f"'{duration}' is not a wall-clock time (use s, min or h)")
    return duration


def _annotated(parse: Any, pattern: str) -> Any:
    return Annotated[
        Duration,
        BeforeValidator(parse),
        PlainSerializer(str, return_type=str),
        WithJsonSchema({"type": "string", "pattern": pattern}),
    ]


TrainingDuration = _annotated(_parse_training, r"^\d+(\.\d+)?\s*(ep|st|img|%)$")
CadenceDuration = _annotated(_parse_cadence, r"^\d+(\.\d+)?\s*(ep|st|img|%)$")
TimeDuration = _annotated(_parse_time, r"^\d+(\.\d+)?\s*(s|min|h)$")
SaveCadenceDuration = _annotated(_parse_save_cadence, r"^\d+(\.\d+)?\s*(ep|st|img|%|s|min|h)$")
