"""Read the records that the observer of each training process writes, also while it writes them. Torch-free.

A record is a JSON object on a line of `HOST-PID.jsonl`: `process` (the first), `setup`, `step`, `device` (the device
seconds of an earlier step), `loss` (of an earlier step, if requested), `patches` (of the script, if requested),
`pause`, `note` and `end`. Times are `time.perf_counter()` seconds of that process. A killed process leaves neither an
end nor a whole last line. Lines that are not records are counted and skipped.
"""

import json
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from paceline.core.files import open_to_read

MAX_STEPS: Final = 20_000
"""Number of steps, pauses and losses kept per process: the last ones. Totals count the others of a longer run too."""
NUM_FIRST_LOSSES: Final = 32
"""Number of losses kept from the first steps of a run, however long it is."""
_MAX_BYTES: Final = 64 << 20
"""Bytes read from a file at once."""
_MAX_NOTES: Final = 50
_MAX_SETTINGS: Final = 1000
_MAX_TEXT: Final = 500
_MAX_VALUE: Final = 1000
"""Characters of a setting, as many as `watch.setup` keeps."""


@dataclass(frozen=True)
class StepRecord:
    """An optimizer step: `stages` are exclusive host seconds, `device_stages` those of the device, {} without a GPU.

    `paused_s` are seconds of pauses inside.
    """

    n: int
    start_s: float
    end_s: float
    stages: Mapping[str, float]
    device_stages: Mapping[str, float]
    samples: int | None = None
    memory: int | None = None
    paused_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds without pauses."""
        return max(self.end_s - self.start_s - self.paused_s, 0.0)


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
    """All records of a training process. Of a long run, only the last `steps` and `pauses` are kept.

    `num_steps`, `steps_s` (their seconds without pauses), `pause_s` and `num_pauses` (by name) count all of them.
    `trained_from_s` is the start of the first step, `ended_s` the time of the last record, and `has_ended` says that
    the process ended by itself. `losses` are by step, the first and the last of a long run, {} unless they were
    requested. `setup` has settings by dotted name (`watch.setup`). `patches` say why each requested one was not
    applied, "" if it was.
    """

    process: ProcessHeader
    steps: tuple[StepRecord, ...]
    pauses: tuple[PauseRecord, ...]
    notes: tuple[str, ...]
    num_steps: int
    steps_s: float
    pause_s: Mapping[str, float]
    num_pauses: Mapping[str, int]
    trained_from_s: float
    ended_s: float
    has_ended: bool
    num_damaged: int = 0
    losses: Mapping[int, float] = field(default_factory=dict)
    setup: Mapping[str, str] = field(default_factory=dict)
    patches: Mapping[str, str] = field(default_factory=dict)


class RecordReader:
    """Read the record files of a folder; each `update` reads what was appended since.

    Of each process, the last `max_steps` steps, pauses and losses are kept.
    """

    def __init__(self, folder: Path, max_steps: int = MAX_STEPS) -> None:
        self._folder = folder
        self._max_steps = max_steps
        self._files: dict[Path, _RecordFile] = {}

    def update(self) -> None:
        """Read new files and new lines."""
        for path in sorted(self._folder.glob("*.jsonl")):
            self._files.setdefault(path, _RecordFile(path, self._max_steps)).update()

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
    max_steps: int
    position: int = 0
    rest: bytes = b""  # of a line without its end
    process: ProcessHeader | None = None
    steps: deque[StepRecord] = field(init=False)
    pauses: deque[PauseRecord] = field(init=False)
    losses: deque[tuple[int, float]] = field(init=False)
    first_losses: dict[int, float] = field(default_factory=dict)
    device: dict[int, Mapping[str, float]] = field(default_factory=dict)
    setup: dict[str, str] = field(default_factory=dict)
    patches: dict[str, str] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)  # an ordered set
    num_steps: int = 0
    steps_s: float = 0.0
    pause_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_pauses: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    trained_from_s: float = math.nan
    last_s: float = -math.inf
    has_ended: bool = False
    num_damaged: int = 0

    def __post_init__(self) -> None:
        self.steps = deque(maxlen=self.max_steps)
        self.pauses = deque(maxlen=self.max_steps)
        self.losses = deque(maxlen=self.max_steps)

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
                step = self._with_pauses(_parse_step(record))
                if not self.num_steps:
                    self.trained_from_s = step.start_s
                self.steps.append(step)
                self.num_steps += 1
                self.steps_s += step.step_s
                self.last_s = max(self.last_s, step.end_s)
            case "device":
                self.device[int(record["n"])] = _parse_seconds(record["stages"])
                if len(self.device) > 2 * self.max_steps:
                    oldest = self.steps[0].n if self.steps else 0
                    self.device = {n: stages for n, stages in self.device.items() if n >= oldest}
            case "loss":
                n, loss = int(record["n"]), float(record["loss"])
                self.losses.append((n, loss))
                if len(self.first_losses) < NUM_FIRST_LOSSES:
                    self.first_losses[n] = loss
            case "setup":
                self.setup = _parse_setup(record["values"])
            case "patches":
                self.patches = {_parse_name(name): str(why)[:_MAX_TEXT] for name, why in record["outcomes"].items()}
            case "pause":
                pause = PauseRecord(_parse_name(record["name"]), _finite(record["start_s"]), _finite(record["end_s"]))
                self.pauses.append(pause)
                self.pause_s[pause.name] += pause.end_s - pause.start_s
                self.num_pauses[pause.name] += 1
                self.last_s = max(self.last_s, pause.end_s)
            case "note":
                if len(self.notes) < _MAX_NOTES:
                    self.notes[str(record["text"])[:_MAX_TEXT]] = None
            case "end":
                self.last_s = max(self.last_s, _finite(record["end_s"]))
                self.has_ended = True
            # A newer observer may write other kinds.

    def _with_pauses(self, step: StepRecord) -> StepRecord:
        # The observer writes the pauses inside of a step just before it.
        inside = takewhile(lambda each: each.end_s > step.start_s, reversed(self.pauses))
        paused_s = math.fsum(max(0.0, min(each.end_s, step.end_s) - max(each.start_s, step.start_s)) for each in inside)
        return replace(step, paused_s=paused_s) if paused_s else step

    def records(self) -> ProcessRecords | None:
        if self.process is None or not self.num_steps:
            return None
        return ProcessRecords(
            self.process,
            tuple(self._steps_with_device_times()),
            tuple(self.pauses),
            tuple(self.notes),
            self.num_steps,
            self.steps_s,
            dict(self.pause_s),
            dict(self.num_pauses),
            self.trained_from_s,
            self.last_s,
            self.has_ended,
            self.num_damaged,
            {**self.first_losses, **dict(self.losses)},
            self.setup,
            self.patches,
        )

    def _steps_with_device_times(self) -> Iterator[StepRecord]:
        for step in self.steps:
            later = self.device.get(step.n)
            yield step if later is None else replace(step, device_stages=later)


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
