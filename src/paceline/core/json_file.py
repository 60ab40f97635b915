"""JSON files: the base class of results, and reading untrusted or damaged files.

They are read from regular files only, bounded in size and depth.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, PlainSerializer

from paceline.core.files import open_to_read

MAX_BYTES: Final = 64 << 20
"""Paceline's own files have some kilobytes, and a few megabytes with 21,841 classes."""


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


# JSON has no infinity and no NaN: they are written as text, which reads back as the same number.
MeasuredFloat = Annotated[float, PlainSerializer(_json_number, return_type=float | str, when_used="json")]


class ResultModel(BaseModel):
    """Frozen base model of JSON files; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raise `ValueError` if it is invalid or nested too deeply."""
    return _parse(text, float)


def _parse(text: str | bytes, to_float: Callable[[str], float]) -> Any:
    try:
        return json.loads(text, parse_float=None if to_float is float else to_float)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """Read a JSON file. Raise `OSError`, also for pipes and devices, and `ValueError` for invalid JSON."""
    return _parse(read_limited(path, max_bytes), _parse_finite)


def read_limited(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file. Raise `OSError` as `read_json`, and `ValueError` above `max_bytes`."""
    with open_to_read(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it is longer than {max_bytes >> 20} MiB")
    return content


def _parse_finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):  # int(inf) would raise OverflowError, which callers do not expect
        raise ValueError(f"{text[:20]} is too large a number")
    return number
