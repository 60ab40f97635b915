"""The base class of results, and the type of their measured numbers."""

import math
from typing import Annotated

from pydantic import BaseModel, ConfigDict, PlainSerializer


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


# JSON has no infinity and no NaN: they are written as text, which reads back as the same number.
MeasuredFloat = Annotated[float, PlainSerializer(_json_number, return_type=float | str, when_used="json")]


class ResultModel(BaseModel):
    """Frozen base model of JSON files; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
