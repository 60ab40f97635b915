"""Read the records that the observer of each training process writes, also while it writes them. Torch-free.

A record is a JSON object on a line of `HOST-PID.jsonl`: `process` (the first), `setup`, `step`, `device` (the device
seconds of an earlier step), `loss` (of an earlier step, if requested), `patches` (of the script, if requested),
`pause`, `note` and `end`. Times are `time.perf_counter()` seconds of that process. A killed process leaves neither an
end nor a whole last line. Lines that are not records are counted and skipped.
"""

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from paceline.core.files import open_to_read

MAX_STEPS: Final = 20_000
"""Number of steps, and of pauses, kept per process: the last ones. Longer runs count the others in their totals."""
_MAX_BYTES: Final = 64 << 20
"""Bytes read from a file at once."""
_MAX_NOTES: Final = 50
_MAX_SETTINGS: Final = 1000
_MAX_TEXT: Final = 500
_MAX_VALUE: Final = 1000
"""Characters of a setting, as many as `watch.setup` keeps."""


@dataclass(frozen=True)
class StepRecord:
    """An optimizer step: `stages` are exclusive host seconds, `device_stages` those of the device, {} without a GPU."""

    n: int
    start_s: float
    end_s: float
    stages: Mapping[str, float]
    device_stages: Mapping[str, float]
    samples: int | None = None
    memory: int | None = None


@dataclass(frozen=True)
class PauseRecord:
    """Time outside of training steps: start_up, evaluate, checkpoint or epoch_boundary."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class ProcessHeader:
    """Who wrote the records: the first record of a file. `offset_s` turns its times into seconds since 1970."""

    pid: int
    host: str
    rank: int
    world_size: int
    started_s: float
    offset_s: float
    python: str = ""
    torch: str = ""
    framework: str = ""
    threads: int = 0


@dataclass(frozen=True)
class ProcessRecords:
    """All records of a training process; `num_steps` and `trained_s` count the steps that are no longer kept too.

    `ended_s` is the time of the last record, and `has_ended` says that the process ended by itself. `losses` are by
    step, {} unless they were requested. `setup` has settings by dotted name (`watch.setup`). `patches` say why each
    requested one was not applied, "" if it was.
    """

    process: ProcessHeader
    steps: tuple[StepRecord, ...]
    pauses: tuple[PauseRecord, ...]
    notes: tuple[str, ...]
    num_steps: int
    ended_s: float
    has_ended: bool
    num_damaged: int = 0
    losses: Mapping[int, float] = field(default_factory=dict)
    setup: Mapping[str, str] = field(default_factory=dict)
    patches: Mapping[str, str] = field(default_factory=dict)


class RecordReader:
    """Read the record files of a folder; each `update` reads what was appended since."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, _RecordFile] = {}

    def update(self) -> None:
        """Read new files and new lines."""
        for path in sorted(self._folder.glob("*.jsonl")):
            self._files.setdefault(path, _RecordFile(path)).update()

    def processes(self) -> list[ProcessRecords]:
        """Return the records of all processes that took a step, by host and process id."""
        found = (each.records() for _, each in sorted(self._files.items()))
        return [each for each in found if each is not None]

    def stray_notes(self) -> list[str]:
        """Return the notes of processes that took no step, such as why the observer stopped."""
        return [text for _, each in sorted(self._files.items()) if each.records() is None for text in each.notes]


@dataclass
class _RecordFile:
    path: Path
    position: int = 0
    rest: bytes = b""  # of a line without its end
    process: ProcessHeader | None = None
    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    device: dict[int, Mapping[str, float]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    setup: dict[str, str] = field(default_factory=dict)
    patches: dict[str, str] = field(default_factory=dict)
    pauses: deque[PauseRecord] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    notes: dict[str, None] = field(default_factory=dict)  # an ordered set
    num_steps: int = 0
    last_s: float = -math.inf
    has_ended: bool = False
    num_damaged: int = 0

    def update(self) -> None:
        while lines := self._read_lines():
            for line in lines:
                try:
                    self._add(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
                    self.num_damaged += 1

    def _read_lines(self) -> list[bytes]:
        try:
            with open_to_read(self.path) as file:
                file.seek(self.position)
                content = file.read(_MAX_BYTES)
        except OSError:  # such as a network file system that is gone for a moment
            return []
        self.position += len(content)
        *lines, self.rest = (self.rest + content).split(b"\n")
        return lines

    def _add(self, record: dict[str, Any]) -> None:  # noqa: C901 - a case per kind of record
        match record["kind"]:
            case "process":
                self.process = _parse_process(record)
                self.last_s = max(self.last_s, self.process.started_s)
            case "step":
                step = _parse_step(record)
                self.steps.append(step)
                self.num_steps += 1
                self.last_s = max(self.last_s, step.end_s)
            case "device":
                self.device[int(record["n"])] = _parse_seconds(record["stages"])
                if len(self.device) > 2 * MAX_STEPS:
                    oldest = self.steps[0].n if self.steps else 0
                    self.device = {n: stages for n, stages in self.device.items() if n >= oldest}
            case "loss":
                if len(self.losses) < MAX_STEPS:
                    self.losses[int(record["n"])] = float(record["loss"])
            case "setup":
                self.setup = _parse_setup(record["values"])
            case "patches":
                self.patches = {_parse_name(name): str(why)[:_MAX_TEXT] for name, why in record["outcomes"].items()}
            case "pause":
                pause = PauseRecord(_parse_name(record["name"]), _finite(record["start_s"]), _finite(record["end_s"]))
                self.pauses.append(pause)
                self.last_s = max(self.last_s, pause.end_s)
            case "note":
                if len(self.notes) < _MAX_NOTES:
                    self.notes[str(record["text"])[:_MAX_TEXT]] = None
            case "end":
                self.last_s = max(self.last_s, _finite(record["end_s"]))
                self.has_ended = True
            # A newer observer may write other kinds.

    def records(self) -> ProcessRecords | None:
        if self.process is None or not self.num_steps:
            return None
        return ProcessRecords(
            self.process,
            tuple(self._steps_with_device_times()),
            tuple(self.pauses),
            tuple(self.notes),
            self.num_steps,
            self.last_s,
            self.has_ended,
            self.num_damaged,
            dict(self.losses),
            self.setup,
            self.patches,
        )

    def _steps_with_device_times(self) -> Iterator[StepRecord]:
        for step in self.steps:
            later = self.device.get(step.n)
            if later is None:
                yield step
            else:
                yield StepRecord(step.n, step.start_s, step.end_s, step.stages, later, step.samples, step.memory)


def _parse_process(record: dict[str, Any]) -> ProcessHeader:
    rank, world_size = record.get("rank"), record.get("world_size")
    return ProcessHeader(
        pid=int(record["pid"]),
        host=str(record["host"])[:_MAX_TEXT],
        rank=0 if rank is None else int(rank),
        world_size=1 if world_size is None else int(world_size),
        started_s=_finite(record["started_s"]),
        offset_s=_finite(record["unix_s"]) - _finite(record["clock_s"]),
        python=str(record.get("python", ""))[:_MAX_TEXT],
        torch=str(record.get("torch", ""))[:_MAX_TEXT],
        framework=str(record.get("framework", ""))[:_MAX_TEXT],
        threads=int(record.get("threads") or 0),
    )


def _parse_step(record: dict[str, Any]) -> StepRecord:
    step = StepRecord(
        n=int(record["n"]),
        start_s=_finite(record["start_s"]),
        end_s=_finite(record["end_s"]),
        stages=_parse_seconds(record["stages"]),
        device_stages=_parse_seconds(record.get("device_stages") or {}),
        samples=None if record.get("samples") is None else int(record["samples"]),
        memory=None if record.get("memory") is None else int(record["memory"]),
    )
    if step.end_s < step.start_s:
        raise ValueError("it ends before it starts")
    return step


def _parse_seconds(stages: dict[str, Any]) -> dict[str, float]:
    return {_parse_name(name): max(0.0, _finite(each_s)) for name, each_s in stages.items()}


def _parse_setup(values: dict[str, Any]) -> dict[str, str]:
    return {str(name)[:_MAX_TEXT]: str(value)[:_MAX_VALUE] for name, value in list(values.items())[:_MAX_SETTINGS]}


def _parse_name(name: Any) -> str:
    # A terminal shows names while the script runs, so they must not contain its escapes.
    if not str(name).isidentifier():
        raise ValueError("it is no name")
    return str(name)[:40]


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("it is not finite")
    return number
