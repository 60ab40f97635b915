"""Read measured points from CSV, and describe a prediction: the request, and the result for a number of ranks."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.errors import DataError, suggest_similar
from paceline.core.experiments.results import Predicted

POINT_COLUMNS: Final = ("ranks", "nodes", "rank_batch", "images", "time_s")
_COUNT_COLUMNS: Final = ("ranks", "nodes", "rank_batch")
_RANGE: Final = (1e-9, 1e15)
"""Range of all values, so that arithmetic cannot overflow."""
COMPUTE_PART: Final = "compute"
FIXED_PART: Final = "start_up"
_HOUR_S: Final = 3600.0
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

    def count_nodes(self, ranks: int) -> int:
        """Return the number of nodes of `ranks` ranks."""
        return math.ceil(ranks / self.ranks_per_node)


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
    headings = [heading.strip() for heading in headings]
    for column in POINT_COLUMNS:
        if (occurrences := headings.count(column)) > 1:
            raise DataError(f"{name}:{line}: has column {column} {occurrences} times (keep one)")
        if not occurrences:
            fix = f"{suggest_similar(column, headings)} (the first line has to be {','.join(POINT_COLUMNS)})"
            raise DataError(f"{name}:{line}: has no column {column}{fix}")
    if not rows:
        raise DataError(f"{name}: holds no points (add a line for each run, {_EXAMPLE})")
    return tuple(_parse_point(row, headings, f"{name}:{line}") for line, row in rows)


def _parse_rows(text: str, name: str) -> list[tuple[int, list[str]]]:
    lines = (line if not line.lstrip().startswith("#") else "" for line in io.StringIO(text, newline=None))
    reader = csv.reader((line.rstrip("\n") for line in lines), skipinitialspace=True, strict=True)
    try:
        return [(reader.line_num, row) for row in reader if any(field.strip() for field in row)]
    except csv.Error as error:
        raise DataError(f"{name}:{reader.line_num}: is not CSV: {error} (write it without quotes)") from None


def _parse_point(row: Sequence[str], headings: Sequence[str], at: str) -> ScalingPoint:
    texts = dict(zip(headings, (text.strip() for text in row), strict=False))
    if not {*POINT_COLUMNS} <= {*texts}:
        raise DataError(f"{at}: has {len(row)} values (write one for each column, {_EXAMPLE})")
    values = {name: _parse_value(name, texts[name], at) for name in POINT_COLUMNS}
    ranks, nodes, rank_batch = (int(values[name]) for name in _COUNT_COLUMNS)
    if nodes > ranks:
        raise DataError(f"{at}: nodes: {nodes} are more than the {ranks} ranks (each node has at least one)")
    return ScalingPoint(ranks, nodes, rank_batch, values["images"], values["time_s"])


def _parse_value(name: str, text: str, at: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise DataError(f"{at}: {name}: '{text}' is not a number (write one, {_EXAMPLE})") from None
    if not math.isfinite(value) or value <= 0:
        raise DataError(f"{at}: {name}: {text} is not above 0 (write what was measured)")
    if not _RANGE[0] <= value <= _RANGE[1]:
        raise DataError(f"{at}: {name}: {text} cannot be (write it between {_RANGE[0]:g} and {_RANGE[1]:g})")
    if name in _COUNT_COLUMNS and value != int(value):
        raise DataError(f"{at}: {name}: {text} is not a whole number (write one from 1 up)")
    return value


def build_predicted(
    request: PredictionRequest, ranks: int, parts: Mapping[str, float], *, alone_s: float, low_s: float, high_s: float
) -> Predicted:
    """Return the prediction for `ranks` ranks from the seconds of the whole run by part.

    `alone_s` are the seconds of the run on one rank, and `low_s` and `high_s` the bounds.
    """
    time_s = math.fsum(parts.values())
    num_steps = request.images / (ranks * request.rank_batch)
    step_s = math.fsum(each_s for name, each_s in parts.items() if name != FIXED_PART) / num_steps
    lost = {name: each_s for name, each_s in parts.items() if name != COMPUTE_PART and each_s > 0}
    gpu_hours = ranks * time_s / _HOUR_S
    return Predicted(
        ranks=ranks,
        nodes=request.count_nodes(ranks),
        rank_batch=request.rank_batch,
        images=request.images,
        time_s=time_s,
        low_s=low_s,
        high_s=high_s,
        step_s=step_s,
        images_per_s=ranks * request.rank_batch / step_s,
        efficiency=alone_s / (ranks * time_s),
        speedup=alone_s / time_s,
        gpu_hours=gpu_hours,
        cost=None if request.price is None else gpu_hours * request.price,
        parts=dict(parts),
        dominates=max(lost, key=lambda name: lost[name], default=""),
    )
