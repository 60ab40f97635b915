"""Read a run directory once into values; the rest of the report opens no files."""

import base64
import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from paceline.core.class_table import ClassCount, read_classes_csv
from paceline.core.errors import PacelineError
from paceline.core.results import RunResult
from paceline.core.rundir import RunDir
from paceline.report.files import TolerantReader
from paceline.report.lenient import parse_result
from paceline.report.thin import Series, downsample
from paceline.report.words import clean_text

MAX_NODES: Final = 16
_MAX_EVALS = 20_000
_MAX_STEPS = 20_000
_MAX_SAMPLES_PER_NODE = 2500
_MAX_SAMPLES = 10_000
_MAX_TABLE_BYTES = 32 << 20
_MAX_THUMBNAIL_BYTES = 256 << 10
_TELEMETRY_FILE = re.compile(r"telemetry\.node(\d+)\.jsonl")
_THUMBNAIL_TYPES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}


@dataclass(frozen=True)
class FirstRecords:
    """The first records of a file, and their total number."""

    rows: tuple[dict[str, Any], ...] = ()
    total: int = 0


@dataclass(frozen=True)
class NodeSeries:
    """Telemetry of a node: `series` has one key per quantity (`gpu3.power_w` for GPU 3), `gpus` names by index."""

    number: int
    series: Series
    gpus: dict[int, str]


@dataclass(frozen=True)
class WorstMistake:
    """A misclassified image: its record in `worst.json`, and its thumbnail as a data URL ("" if there is none)."""

    record: dict[str, Any]
    thumbnail: str


@dataclass(frozen=True)
class RunData:
    """The contents of a run directory. Missing files are empty values; `problems` has a line per unreadable file."""

    path: Path
    result: RunResult | None = None
    recipe: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    evals: tuple[dict[str, Any], ...] = ()
    steps: Series = field(default_factory=Series)
    nodes: tuple[NodeSeries, ...] = ()
    num_nodes: int = 0
    classes: tuple[ClassCount, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    mistakes: tuple[WorstMistake, ...] = ()
    warnings: FirstRecords = FirstRecords()
    bad_images: FirstRecords = FirstRecords()
    attempts: FirstRecords = FirstRecords()
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the folder's name, which starts with the recipe's."""
        return clean_text(self.path.resolve().name)


def read_run(rundir: RunDir) -> RunData:
    """Read a run directory, finished or not. Raise `PacelineError` if it is none."""
    try:
        is_run = any((rundir.path / name).is_file() for name in ("recipe.yaml", "result.json", "plan.json"))
    except OSError as error:
        raise PacelineError(f"{rundir.path}: cannot be read: {error.strerror} (name another run)") from None
    if not is_run:
        raise PacelineError(f"{rundir.path}: is not a run directory (name one that paceline train has written)")
    reader = TolerantReader()
    result, problem = parse_result(reader.read_object(rundir.path / "result.json"))
    nodes = sorted(
        (int(match[1]), path) for path in rundir.path.iterdir() if (match := _TELEMETRY_FILE.fullmatch(path.name))
    )
    classes, confusion = _read_classes(reader, rundir)
    return RunData(
        path=rundir.path,
        result=result,
        recipe=reader.read_text(rundir.recipe, 256 << 10),
        plan=reader.read_object(rundir.path / "plan.json"),
        machine=reader.read_object(rundir.path / "machine.json"),
        profile=reader.read_object(rundir.profile),
        evals=tuple(islice(reader.read_records(rundir.evals), _MAX_EVALS)),
        steps=_read_steps(reader, rundir.steps),
        nodes=_read_nodes(reader, nodes[:MAX_NODES]),
        num_nodes=len(nodes),
        classes=classes,
        confusion=confusion,
        mistakes=tuple(_read_mistakes(reader, rundir)),
        warnings=_read_first(reader.read_records(rundir.warnings), 100),
        bad_images=_read_first(reader.read_records(rundir.bad_images), 100),
        attempts=_read_first(reader.read_records(rundir.attempts), 1000),
        problems=tuple(filter(None, [problem, *reader.problems])),
    )


def _read_first(records: Iterable[dict[str, Any]], number: int) -> FirstRecords:
    first: list[dict[str, Any]] = []
    total = 0
    for total, record in enumerate(records, start=1):  # noqa: B007 - counts all records
        if len(first) < number:
            first.append(record)
    return FirstRecords(tuple(first), total)


def _read_steps(reader: TolerantReader, path: Path) -> Series:
    records, is_sample = reader.read_sample(path, _MAX_STEPS)
    return replace(downsample(records), is_sample=is_sample)


def _read_nodes(reader: TolerantReader, files: Sequence[tuple[int, Path]]) -> tuple[NodeSeries, ...]:
    # The more nodes, the fewer samples of each.
    nodes = []
    for number, path in files:
        records, is_sample = reader.read_sample(path, min(_MAX_SAMPLES_PER_NODE, _MAX_SAMPLES // len(files)))
        gpus: dict[int, str] = {}
        series = downsample(_flatten_gpus(record, gpus) for record in records)
        nodes.append(NodeSeries(number, replace(series, is_sample=is_sample), gpus))
    return tuple(nodes)


def _flatten_gpus(record: dict[str, Any], gpus: dict[int, str]) -> dict[str, Any]:
    """Return a record with its GPUs' values as top-level keys, and add their names to `gpus`."""
    entries = record.pop("gpus", None)
    for each in entries if isinstance(entries, list) else []:
        if isinstance(each, dict) and isinstance(each.get("index"), int):
            index = each["index"]
            gpus.setdefault(index, clean_text(each.get("name", "")))
            record |= {f"gpu{index}.{key}": value for key, value in each.items()}
    return record


def _read_classes(reader: TolerantReader, rundir: RunDir) -> tuple[tuple[ClassCount, ...], tuple[tuple[int, ...], ...]]:
    try:
        classes = read_classes_csv(reader.read_text(rundir.classes, _MAX_TABLE_BYTES))
        rows = list(
            csv.reader(io.StringIO(reader.read_text(rundir.confusion, _MAX_TABLE_BYTES), newline=""), strict=True)
        )
        confusion = tuple(tuple(int(value) for value in row[1:]) for row in rows[1:])
    except (PacelineError, ValueError, csv.Error):
        reader.problems.append("classes.csv, confusion.csv: are not valid class tables")
        return (), ()
    if any(value < 0 for row in confusion for value in row) or any(
        not 0 <= each.correct <= each.images for each in classes
    ):
        reader.problems.append("classes.csv, confusion.csv: have impossible counts")
        return (), ()
    is_square = len(confusion) == len(classes) and all(len(row) == len(classes) for row in confusion)
    return classes, confusion if is_square else ()


def _read_mistakes(reader: TolerantReader, rundir: RunDir) -> Iterator[WorstMistake]:
    records = reader.read_json(rundir.worst / "worst.json")
    for record in records[:100] if isinstance(records, list) else []:
        if isinstance(record, dict):
            yield WorstMistake(record, _read_thumbnail(reader, rundir.worst, record.get("file")))


def _read_thumbnail(reader: TolerantReader, folder: Path, name: object) -> str:
    """Return a thumbnail as a data URL; "" unless it is a PNG or JPEG file in `folder` itself."""
    # A name in an untrusted worst.json must not embed other files of the machine into the report.
    if not isinstance(name, str) or not name or "\0" in name or Path(name).name != name:
        return ""
    data = reader.read_bytes(folder / name, _MAX_THUMBNAIL_BYTES + 1, follows_links=False)
    kind = next((kind for magic, kind in _THUMBNAIL_TYPES.items() if data.startswith(magic)), None)
    if kind is None or len(data) > _MAX_THUMBNAIL_BYTES:
        return ""
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
