"""Write the steps and pauses of a watched command as a Chrome trace, one process per rank. Torch-free.

Records have the sum of each stage per step, not when it began: the stages of a step are drawn one after the other in
their usual order, in a thread whose name says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from paceline.core.stages import WATCHED, display_name
from paceline.measure.chrome_trace import TraceEvent, metadata_event, write_trace
from paceline.watch.records import ProcessRecords

TRACE: Final = "trace.json.gz"
_STEPS_TID, _STAGES_TID, _DEVICE_TID = 0, 1, 2
_THREADS: Final = {
    _STEPS_TID: "steps and pauses",
    _STAGES_TID: "stages: sums per step, in their usual order",
    _DEVICE_TID: "stages on the device: sums per step, in their usual order",
}


def write_watch_trace(ranks: Sequence[ProcessRecords], path: Path) -> None:
    """Write the trace of all ranks on one time axis. Raise `OSError` if the file cannot be written."""
    base_s = min(each.process.started_s + each.process.offset_s for each in ranks)
    header = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": round(base_s * 1e9)}
    write_trace(path, header, (event for each in ranks for event in _rank_events(each, base_s)))


def _rank_events(records: ProcessRecords, base_s: float) -> Iterator[TraceEvent]:
    rank, shift_s = records.process.rank, records.process.offset_s - base_s
    yield metadata_event("process_name", rank, 0, {"name": f"rank {rank}"})
    yield metadata_event("process_sort_index", rank, 0, {"sort_index": rank})
    has_device = any(each.device_stages for each in records.steps)
    for tid, name in _THREADS.items():
        if tid != _DEVICE_TID or has_device:
            yield metadata_event("thread_name", rank, tid, {"name": name})

    def event(name: str, tid: int, start_s: float, length_s: float) -> TraceEvent:
        at_us, length_us = round((start_s + shift_s) * 1e6, 3), round(length_s * 1e6, 3)
        return {"ph": "X", "cat": "paceline", "name": name, "pid": rank, "tid": tid, "ts": at_us, "dur": length_us}

    def stage_events(stages: Mapping[str, float], tid: int, start_s: float, end_s: float) -> Iterator[TraceEvent]:
        for name in sorted(stages, key=lambda each: WATCHED.index(each) if each in WATCHED else len(WATCHED)):
            length_s = min(stages[name], end_s - start_s)
            if length_s > 0:
                yield event(display_name(name), tid, start_s, length_s)
                start_s += length_s

    for step in records.steps:
        yield event(f"step {step.n}", _STEPS_TID, step.start_s, step.end_s - step.start_s)
        yield from stage_events(step.stages, _STAGES_TID, step.start_s, step.end_s)
        yield from stage_events(step.device_stages, _DEVICE_TID, step.start_s, step.end_s)
    for pause in records.pauses:
        yield event(display_name(pause.name), _STEPS_TID, pause.start_s, pause.end_s - pause.start_s)
