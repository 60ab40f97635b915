"""Read measured points from CSV, and describe a prediction request."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.errors import DataError, suggest_similar

POINTS_FILE: Final = "points.csv"
"""Table in the folder of `paceline scale`, for predictions."""
POINT_COLUMNS: Final = ("ranks", "nodes", "rank_batch", "images", "time_s")
_COUNT_COLUMNS: Final = ("ranks", "nodes", "rank_batch")
_MAX_COUNT: Final = 10**9
_AMOUNT_RANGE: Final = (1e-9, 1e15)
"""Range of images and seconds, so that arithmetic cannot overflow."""
_EXAMPLE: Final = "such as 4,1,128,12811670,5355.9"


@dataclass(frozen=True)
class PredictionRequest:
    """A prediction request: `images` in all, on `at` ranks with `rank_batch` images each, `ranks_per_node` per node.

    `price` is per rank and hour, None if not wanted.
    """

    at: tuple[int, ...]
    ranks_per_node: int
    rank_batch: int
    images: float
    price: float | None = None


@dataclass(frozen=True)
class ScalingPoint:
    """A measured run: `images` images on `ranks` ranks of `nodes` nodes, `rank_batch` per rank and step.

    `time_s` is its time in seconds. A speed is written as the images of one second, with a time of 1.
    """

    ranks: int
    nodes: int
    rank_batch: int
    images: float
    time_s: float


def read_points(path: Path) -> tuple[ScalingPoint, ...]:
    """Read a CSV file with the columns of `POINT_COLUMNS`, in any order; other columns are ignored.

    Empty lines and lines that begin with `#` are skipped. Raise `DataError`, in one line with file and line, if the
    file is unreadable, a column is missing, or a value is invalid.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror} (give a CSV file with --points)") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: is not text in UTF-8 (save it as CSV in UTF-8)") from None
    return parse_points(text, str(path))


def parse_points(text: str, name: str) -> tuple[ScalingPoint, ...]:
    """Parse a CSV text; `name` is the file's, for messages."""
    numbered = _parse_rows(text, name)
    if not numbered:
        raise DataError(f"{name}: is empty (its first line has to be {','.join(POINT_COLUMNS)})")
    (line, headings), *rows = numbered
    columns = _find_columns([heading.strip() for heading in headings], f"{name}:{line}")
    if not rows:
        raise DataError(f"{name}: holds no points (add a line for each run, {_EXAMPLE})")
    return tuple(_parse_point(row, columns, f"{name}:{line}") for line, row in rows)


def _parse_rows(text: str, name: str) -> list[tuple[int, list[str]]]:
    lines = (line if not line.lstrip().startswith("#") else "" for line in io.StringIO(text, newline=None))
    reader = csv.reader((line.rstrip("\n") for line in lines), skipinitialspace=True, strict=True)
    rows = []
    try:
        for row in reader:
            if any(field.strip() for field in row):
                rows.append((reader.line_num, row))
    except csv.Error as error:
        raise DataError(f"{name}:{reader.line_num}: is not CSV: {error} (write it without quotes)") from None
    return rows


def _find_columns(headings: Sequence[str], at: str) -> Mapping[str, int]:
    for name in POINT_COLUMNS:
        occurrences = headings.count(name)
        if occurrences == 0:
            guess = suggest_similar(name, headings)
            raise DataError(f"{at}: has no column {name}{guess} (the first line has to be {','.join(POINT_COLUMNS)})")
        if occurrences > 1:
            raise DataError(f"{at}: has column {name} {occurrences} times (keep one)")
    return {name: headings.index(name) for name in POINT_COLUMNS}


def _parse_point(row: Sequence[str], columns: Mapping[str, int], at: str) -> ScalingPoint:
    if len(row) <= max(columns.values()):
        raise DataError(f"{at}: has {len(row)} values (write one for each column, {_EXAMPLE})")
    texts = {name: row[column].strip() for name, column in columns.items()}
    ranks, nodes, rank_batch = (_parse_count(name, texts[name], at) for name in _COUNT_COLUMNS)
    if nodes > ranks:
        raise DataError(f"{at}: nodes: {nodes} are more than the {ranks} ranks (each node has at least one)")
    images, time_s = (_parse_amount(name, texts[name], at) for name in ("images", "time_s"))
    return ScalingPoint(ranks, nodes, rank_batch, images, time_s)


def _parse_count(name: str, text: str, at: str) -> int:
    value = _parse_amount(name, text, at)
    if value != int(value) or value > _MAX_COUNT:
        raise DataError(f"{at}: {name}: {text} is not a whole number (write one from 1 up)")
    return int(value)


def _parse_amount(name: str, text: str, at: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise DataError(f"{at}: {name}: '{text}' is not a number (write one, {_EXAMPLE})") from None
    if not math.isfinite(value) or value <= 0:
        raise DataError(f"{at}: {name}: {text} is not above 0 (write what was measured)")
    if not _AMOUNT_RANGE[0] <= value <= _AMOUNT_RANGE[1]:
        raise DataError(
            f"{at}: {name}: {text} cannot be (write it between {_AMOUNT_RANGE[0]:g} and {_AMOUNT_RANGE[1]:g})"
        )
    return value
