"""Read a run directory, tolerating missing, damaged, huge and newer files."""

import base64
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from paceline.core.errors import PacelineError
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.files import open_to_read
from paceline.core.results import CalibrationBin, ClassCount, RunResult, read_calibration_csv, read_classes_csv
from paceline.core.run_dir import RunDir
from paceline.report.series import Series, downsample
from paceline.report.settings import read_settings
from paceline.report.text import MAX_MAGNITUDE, clean_text

MAX_FILE_BYTES = 8 << 20
MAX_RECORDS = 2_000_000
MAX_NODES: Final = 16
_MAX_LINE_BYTES = 1 << 20  # a longer line is not a record of ours, and could exhaust memory
_MAX_EVALS = 20_000
_MAX_PAUSES = 20_000
_MAX_STEPS = 20_000
_MAX_SAMPLES_PER_NODE = 2500
_MAX_SAMPLES = 10_000
_MAX_TABLE_BYTES = 32 << 20
_MAX_THUMBNAIL_BYTES = 256 << 10
_MAX_MAPS = 2
_TELEMETRY_FILE = re.compile(r"telemetry\.node(\d+)\.jsonl")
_THUMBNAIL_TYPES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}


@dataclass(frozen=True)
class FirstRecords:
    """The first records of a file, and their total number."""

    rows: tuple[dict[str, Any], ...] = ()
    total: int = 0


@dataclass(frozen=True)
class NodeSeries:
    """Telemetry of a node: `series` has keys such as `gpu3.power_w`, `gpus` names by index."""

    number: int
    series: Series
    gpus: dict[int, str]


@dataclass(frozen=True)
class SavedImage:
    """A record of `worst.json` or `inputs.json`, and its thumbnail as a data URL or "".

    `maps` are the data URLs of its overlays by what they explain.
    """

    record: dict[str, Any]
    thumbnail: str
    maps: dict[str, str] = field(default_factory=dict)


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
    calibration: tuple[CalibrationBin, ...] = ()
    mistakes: tuple[SavedImage, ...] = ()
    dataset: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    input_images: tuple[SavedImage, ...] = ()
    warnings: FirstRecords = FirstRecords()
    bad_images: FirstRecords = FirstRecords()
    attempts: FirstRecords = FirstRecords()
    pauses: FirstRecords = FirstRecords()
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the folder's name, which starts with the recipe's."""
        return clean_text(self.path.resolve().name)

    @property
    def is_multi_label(self) -> bool:
        """Return whether images have several labels, and evaluations therefore no top-1."""
        return bool(self.evals) and not any("top1" in each for each in self.evals)

    @cached_property
    def settings(self) -> dict[str, str]:
        """Return the recipe as text by dotted path; empty if it cannot be read."""
        return read_settings(self.recipe)[0]


def is_experiment_dir(path: Path) -> bool:
    """Return whether a folder is an experiment, finished or not, and not a run directory."""
    folder = ExperimentDir(path)
    return folder.result.is_file() or folder.trials.is_dir()


class TolerantReader:
    """Read the files of a run directory, and collect a line per problem."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def read_text(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> str:
        """Return a text file, cut to `max_bytes`; "" if it is missing."""
        data = self.read_bytes(path, max_bytes + 1)
        if len(data) > max_bytes:
            self._add_problem(path, f"only its first {max_bytes:,} bytes are shown")
        return data[:max_bytes].decode("utf-8", "replace")

    def read_bytes(self, path: Path, max_bytes: int, *, follows_links: bool = True) -> bytes:
        """Return the first `max_bytes` of a regular file; nothing if it is missing."""
        try:
            if not path.is_file() or (path.is_symlink() and not follows_links):
                return b""
            with open_to_read(path) as file:
                return file.read(max_bytes)
        except OSError as error:
            self._add_problem(path, f"cannot be read: {error.strerror}")
            return b""

    def read_json(self, path: Path) -> Any:
        """Return the value in a JSON file; None if it is missing or invalid."""
        text = self.read_text(path)
        if not text.strip():
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            self._add_problem(path, f"is not valid JSON: {error}")
            return None

    def read_object(self, path: Path) -> dict[str, Any]:
        """Return the object in a JSON file; an empty one if it is missing or invalid."""
        value = self.read_json(path)
        if value is None or isinstance(value, dict):
            return value or {}
        self._add_problem(path, "is not a JSON object")
        return {}

    def read_sample(self, path: Path, max_records: int) -> tuple[Iterator[dict[str, Any]], bool]:
        """Return the records of a JSON Lines file, and whether they are a sample.

        Of a file with more than `2 * max_records` lines, return at most `max_records`, spread evenly from the first
        to the last: parsing all of a long file would take minutes.
        """
        num_lines = sum(1 for _ in self._read_lines(path))
        every = -(-num_lines // (max_records - 1)) if num_lines > 2 * max_records else 1
        lines = (
            line for index, line in enumerate(self._read_lines(path)) if index % every == 0 or index == num_lines - 1
        )
        return self._parse_lines(path, lines), every > 1

    def read_records(self, path: Path, max_records: int = MAX_RECORDS) -> Iterator[dict[str, Any]]:
        """Yield the records of a JSON Lines file; count and skip invalid lines."""
        lines = self._read_lines(path)
        yield from self._parse_lines(path, islice(lines, max_records))
        if next(lines, None) is not None:
            self._add_problem(path, f"only its first {max_records:,} lines are read")

    def _parse_lines(self, path: Path, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        damaged = 0
        for line in lines:
            record = _parse_record(line)
            if record is None:
                damaged += 1
            else:
                yield record
        if damaged:
            self._add_problem(path, f"{damaged:,} lines are not records and were skipped")

    def _read_lines(self, path: Path) -> Iterator[bytes]:
        # A last line without newline was cut off.
        try:
            if not path.is_file():
                return
            with open_to_read(path) as file:
                while line := file.readline(_MAX_LINE_BYTES):
                    if line.endswith(b"\n"):
                        yield line
                    elif len(line) == _MAX_LINE_BYTES:
                        yield b"too long"  # not JSON, so it counts as damaged
                        while (rest := file.readline(_MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                            pass
        except OSError as error:
            self._add_problem(path, f"cannot be read: {error.strerror}")

    def _add_problem(self, path: Path, what: str) -> None:
        problem = clean_text(f"{path.name}: {what}", 300)
        if problem not in self.problems:
            self.problems.append(problem)


def _parse_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def parse_result(values: dict[str, Any]) -> tuple[RunResult | None, str]:
    """Return the result or None, and what is wrong with it ("" if nothing).

    Ignore fields that a newer version wrote.
    """
    if not values:
        return None, ""
    # Sums and squares of such numbers would overflow.
    if _has_huge_number(values):
        return None, "result.json: is not a result: it has numbers with a hundred digits"
    try:
        return RunResult.model_validate(values), ""
    except ValidationError as error:
        unknown = [each["loc"] for each in error.errors() if each["type"] == "extra_forbidden"]
        others = [each for each in error.errors() if each["type"] != "extra_forbidden"]
    if others:
        location = ".".join(str(key) for key in others[0]["loc"])
        return None, clean_text(f"result.json: is not a result: {location}: {others[0]['msg']}", 300)
    for path in unknown:
        _delete_path(values, path)
    names = ", ".join(".".join(str(key) for key in path) for path in unknown)
    return RunResult.model_validate(values), clean_text(
        f"result.json: unknown to this version and not shown: {names}", 300
    )


def _has_huge_number(value: Any) -> bool:
    match value:
        case dict():
            return any(map(_has_huge_number, value.values()))
        case list():
            return any(map(_has_huge_number, value))
        case int() | float():
            return MAX_MAGNITUDE <= abs(value) < inf
        case _:
            return False


def _delete_path(values: Any, path: tuple[int | str, ...]) -> None:
    *parents, last = path
    for key in parents:
        values = values[key]
    del values[last]


def require_run(path: Path) -> None:
    """Raise `PacelineError` if `path` is no run directory, finished or not."""
    try:
        is_run = any((path / name).is_file() for name in ("recipe.yaml", "result.json", "plan.json"))
    except OSError as error:
        raise PacelineError(f"{path}: cannot be read: {error.strerror} (name another run)") from None
    if not is_run:
        raise PacelineError(f"{path}: is not a run directory (name one that paceline train has written)")


def read_run(rundir: RunDir) -> RunData:
    """Read a run directory, finished or not. Raise `PacelineError` if it is none."""
    require_run(rundir.path)
    reader = TolerantReader()
    nodes = sorted(
        (int(match[1]), path) for path in rundir.path.iterdir() if (match := _TELEMETRY_FILE.fullmatch(path.name))
    )
    inputs = reader.read_object(rundir.inputs / "inputs.json")
    run = replace(
        _read_facts(reader, rundir),
        profile=reader.read_object(rundir.profile),
        evals=tuple(islice(reader.read_records(rundir.evals), _MAX_EVALS)),
        steps=_read_steps(reader, rundir.steps),
        nodes=_read_nodes(reader, nodes[:MAX_NODES]),
        num_nodes=len(nodes),
        mistakes=tuple(_read_images(reader, rundir.worst, reader.read_json(rundir.worst / "worst.json"))),
        dataset=reader.read_object(rundir.dataset),
        inputs=inputs,
        input_images=tuple(_read_images(reader, rundir.inputs, inputs.get("images"))),
        pauses=_read_first(reader.read_records(rundir.pauses), _MAX_PAUSES),
        bad_images=_read_first(reader.read_records(rundir.bad_images), 100),
    )
    return replace(run, problems=tuple(reader.problems))


def read_run_facts(rundir: RunDir) -> RunData:
    """Read the files of a run that are small, for its summary."""
    reader = TolerantReader()
    run = _read_facts(reader, rundir)
    return replace(run, problems=tuple(reader.problems))


def _read_facts(reader: TolerantReader, rundir: RunDir) -> RunData:
    result, problem = parse_result(reader.read_object(rundir.path / "result.json"))
    reader.problems += [problem] if problem else []
    classes, confusion = _read_classes(reader, rundir)
    return RunData(
        path=rundir.path,
        result=result,
        recipe=reader.read_text(rundir.recipe, 256 << 10),
        plan=reader.read_object(rundir.path / "plan.json"),
        machine=reader.read_object(rundir.path / "machine.json"),
        classes=classes,
        confusion=confusion,
        calibration=_read_calibration(reader, rundir),
        warnings=_read_first(reader.read_records(rundir.warnings), 100),
        attempts=_read_first(reader.read_records(rundir.attempts), 1000),
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
    """Return a record with its GPUs' values as top-level keys; add their names to `gpus`."""
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


def _read_calibration(reader: TolerantReader, rundir: RunDir) -> tuple[CalibrationBin, ...]:
    text = reader.read_text(rundir.calibration, _MAX_TABLE_BYTES)
    try:
        return read_calibration_csv(text) if text else ()  # missing in runs of older versions
    except PacelineError as error:
        reader.problems.append(f"calibration.csv: {error}")
        return ()


def _read_images(reader: TolerantReader, folder: Path, records: object) -> Iterator[SavedImage]:
    for record in records[:100] if isinstance(records, list) else []:
        if isinstance(record, dict):
            files = record.get("maps")
            drawn = {
                clean_text(what, 20): _read_thumbnail(reader, folder, file)
                for what, file in islice((files if isinstance(files, dict) else {}).items(), _MAX_MAPS)
            }
            maps = {what: address for what, address in drawn.items() if address}
            yield SavedImage(record, _read_thumbnail(reader, folder, record.get("file")), maps)


def _read_thumbnail(reader: TolerantReader, folder: Path, name: object) -> str:
    """Return a thumbnail as a data URL; "" for any other file."""
    # A name in an untrusted record must not embed other files of the machine into the report.
    if not isinstance(name, str) or not name or "\0" in name or Path(name).name != name:
        return ""
    data = reader.read_bytes(folder / name, _MAX_THUMBNAIL_BYTES + 1, follows_links=False)
    kind = next((kind for magic, kind in _THUMBNAIL_TYPES.items() if data.startswith(magic)), None)
    if kind is None or len(data) > _MAX_THUMBNAIL_BYTES:
        return ""
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
