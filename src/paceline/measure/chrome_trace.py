"""Traces in Chrome's format, as torch's profiler (Kineto) writes them and Perfetto reads them. Torch-free.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are microseconds
since `baseTimeNanoseconds` after 1970. Complete events ("ph": "X") of one thread must nest, or Perfetto drops them. The
header is on the first line, then one event per line, so that a trace is read line by line.
"""

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from paceline.core.files import replace_file

TraceEvent = dict[str, Any]
MARK: Final = "paceline:"
"""Prefix of the range names of stages. It is removed in the file."""
STAGE_SWITCH: Final = MARK + "turn:"
STAGES_TID: Final = 0
"""Thread id for the stages; no Linux thread has it."""
STEP: Final = "ProfilerStep#"


def stage_switch_mark(stage: str) -> str:
    """Return the name of a range at whose start the open stage ends and `stage` begins."""
    return STAGE_SWITCH + stage


def rewrite_trace(recorded: Path, out: Path, *, rank: int, world_size: int, stop: int) -> None:
    """Write a Kineto recording as the trace of one rank; step `stop` and later ones were not completed."""
    header = json.loads(recorded.read_bytes())
    events = header.pop("traceEvents")
    # Traces are shared, so they carry no host name and no path.
    for private in ("host_name", "traceName"):
        header.pop(private, None)
    header["distributedInfo"] = header.get("distributedInfo", {}) | {"rank": rank, "world_size": world_size}
    write_trace(out, header, _with_stages(event for event in events if not _is_step_from(stop, event)))


def merge_traces(paths: Sequence[Path], out: Path, offsets_s: Mapping[int, float]) -> None:
    """Merge the traces of several ranks on one time axis; rank N's process is called `rank N`.

    `offsets_s` are the seconds by which a rank's clock is ahead of rank 0's (missing: 0). Without traces nothing is
    written. Raise `OSError` if the file cannot be written.
    """
    if not paths:
        return
    headers = [_read_header(path) for path in paths]
    # Each trace counts from its own base time, so move all to the earliest.
    base_ns = min(header["baseTimeNanoseconds"] for header in headers)
    merged = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns}

    def events() -> Iterator[TraceEvent]:
        for place, (path, header) in enumerate(zip(paths, headers, strict=True)):
            rank = header["distributedInfo"]["rank"]
            shift_us = (header["baseTimeNanoseconds"] - base_ns) / 1e3 - offsets_s.get(rank, 0.0) * 1e6
            yield from _place_events(_read_events(path), rank, shift_us, place, len(paths))

    write_trace(out, merged, events())


def trace_totals(path: Path) -> dict[str, float]:
    """Return the seconds of each stage and pause in the completed steps of one rank's trace."""
    steps: list[tuple[float, float]] = []
    stages: list[TraceEvent] = []
    for event in _read_events(path):
        if _is_step(event):
            steps.append((event["ts"], event["ts"] + event["dur"]))
        elif _is_stage(event):
            stages.append(event)
    steps.sort()
    totals: dict[str, float] = {}
    for stage in stages:
        place = bisect_right(steps, (stage["ts"], float("inf"))) - 1
        if place >= 0 and stage["ts"] < steps[place][1]:
            totals[stage["name"]] = totals.get(stage["name"], 0.0) + stage["dur"] / 1e6
    return totals


def _is_step(event: TraceEvent) -> bool:
    return event.get("cat") == "user_annotation" and event["name"].startswith(STEP)


def _is_step_from(stop: int, event: TraceEvent) -> bool:
    return event.get("name", "").startswith(STEP) and int(event["name"].removeprefix(STEP)) >= stop


def _is_stage(event: TraceEvent) -> bool:
    return event.get("cat") == "user_annotation" and event.get("tid") == STAGES_TID


def _with_stages(events: Iterable[TraceEvent]) -> Iterator[TraceEvent]:
    """Yield events, with the stages in a thread of their own and split where they were switched."""
    # A hook switches stages inside torch's own ranges, and a stage split there would not nest with them.
    stages, switches = [], []
    for event in events:
        name = event.get("name", "")
        if event.get("cat") != "user_annotation" or not name.startswith(MARK):
            yield event | {"name": name.removeprefix(MARK)}  # a GPU's ranges are named after the host's
        elif name.startswith(STAGE_SWITCH):
            switches.append(event)
        else:
            stages.append(event | {"name": name.removeprefix(MARK), "tid": STAGES_TID})
    for pid in {stage["pid"] for stage in stages}:
        yield metadata_event("thread_name", pid, STAGES_TID, {"name": "stages"})
        yield metadata_event("thread_sort_index", pid, STAGES_TID, {"sort_index": -1})
    yield from _split_stages(sorted(stages, key=_start_us), sorted(switches, key=_start_us))


def _split_stages(stages: Sequence[TraceEvent], switches: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
    starts = [_start_us(stage) for stage in stages]
    parts = [[stage] for stage in stages]
    for switch in switches:
        place = bisect_right(starts, _start_us(switch)) - 1
        if place < 0:
            continue  # its stage began before the recording
        last, switched_us = parts[place][-1], _start_us(switch)
        left_us = last["ts"] + last["dur"] - switched_us
        if left_us > 0:
            last["dur"] = round(switched_us - last["ts"], 3)
            rest = {"name": switch["name"].removeprefix(STAGE_SWITCH), "ts": switched_us, "dur": round(left_us, 3)}
            parts[place].append(last | rest)
    for each in parts:
        yield from each


def _start_us(event: TraceEvent) -> float:
    return float(event["ts"])


def _place_events(
    events: Iterable[TraceEvent], rank: int, shift_us: float, place: int, num_places: int
) -> Iterator[TraceEvent]:
    """Yield a rank's events shifted by `shift_us`, with process and flow ids that no other rank has."""
    pids: dict[Any, int] = {}
    named: dict[Any, str] = {}
    host: Any = None
    for event in events:
        if event["ph"] == "M" and event["name"].startswith("process_"):
            if event["name"] == "process_labels":
                named[event["pid"]] = event["args"]["labels"]
            continue
        if host is None and _is_step(event):
            host = event["pid"]
        pid = pids.setdefault(event["pid"], len(pids) * num_places + place)
        moved = event | {"pid": pid}
        if "ts" in event:
            moved["ts"] = round(event["ts"] + shift_us, 3)
        if event["ph"] in "stf":  # flow events: start, step, finish
            moved["id"] = event["id"] * num_places + place
        yield moved
    for old, pid in pids.items():
        name = f"rank {rank}" if old == host else f"rank {rank} {named.get(old, old)}"
        yield metadata_event("process_name", pid, 0, {"name": name})
        yield metadata_event("process_sort_index", pid, 0, {"sort_index": rank * 100 + (0 if old == host else 1)})


def metadata_event(name: str, pid: Any, tid: int, args: TraceEvent) -> TraceEvent:
    """Return an event that names or sorts a process or a thread."""
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _read_header(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        header: dict[str, Any] = json.loads(file.readline() + "]}")
    return header


def _read_events(path: Path) -> Iterator[TraceEvent]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        file.readline()
        for line in file:
            if line.startswith("{"):
                yield json.loads(line.rstrip(",\n"))


def write_trace(path: Path, header: Mapping[str, Any], events: Iterable[TraceEvent]) -> None:
    """Write a gzipped trace. Raise `OSError` if the file cannot be written."""
    # Written beside `path` and renamed, so that readers of the folder never see a partial file.
    with replace_file(path) as binary, gzip.open(binary, "wt", encoding="utf-8", compresslevel=5) as file:
        file.write(json.dumps(header)[:-1] + ', "traceEvents": [\n')
        separator = ""
        for event in events:
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]}\n")
