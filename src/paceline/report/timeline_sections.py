"""Report section on the timeline of a run: start-up, training, evaluations, checkpoints and time between processes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median
from typing import Any, Final

from paceline.core.stages import EPOCH_BOUNDARY, UNFREEZE, WEIGH
from paceline.core.units import count, seconds
from paceline.report import cells
from paceline.report.document import BarChart, BarRow, BarSegment, Block, KeyValueList, PageSection, Table, TableCell
from paceline.report.read_run import RunData
from paceline.report.text import clean_text, finite_or_none, format_time

_NUM_SLOTS: Final = 300
# Up to this number of evaluations and checkpoints, each is visible however short it is.
_MAX_VISIBLE_PAUSES: Final = 60
_MAX_PROCESSES: Final = 100
_SLOW_SHARE: Final = 0.5
_PAUSES: Final = ("evaluate", WEIGH, "checkpoint", UNFREEZE)
TRAINING, _SLOW, START_UP, _REWORK, _DOWN = "training", "slow", "start_up", "rework", "down"
# Labels and CSS classes, in the order of the legend.
_KINDS: Final = {
    START_UP: ("start-up", "c-start-up"),
    TRAINING: ("training", "c-useful"),
    _SLOW: ("slow steps: below half of the median speed", "c-wrong"),
    "evaluate": ("evaluation", "c-evaluate"),
    WEIGH: ("image weighing", "c-evaluate"),
    "checkpoint": ("checkpoint", "c-checkpoint"),
    UNFREEZE: ("unfreezing", "c-unfreeze"),
    _REWORK: ("steps that were lost and repeated", "c-rework"),
    _DOWN: ("down", "c-down"),
}


@dataclass(frozen=True)
class _Process:
    """A process of rank 0; times are seconds since 1970, `trained_s` those of the run at its first step."""

    started_s: float
    first_step_s: float
    ended_s: float
    trained_s: float
    lost_s: float  # of training, at its end
    num_ranks: float
    from_step: float
    until_step: float  # those after it are repeated by the next process
    step: float | None  # at its end; None if no end was recorded
    status: str

    @property
    def ending(self) -> str:
        """Return how it ended: `killed at step 1,310`."""
        return f"{self.status} at step {self.step:,.0f}" if self.step is not None else self.status


@dataclass(frozen=True)
class Span:
    """What a process did from `begin_s` to `end_s`, seconds since 1970."""

    kind: str
    begin_s: float
    end_s: float


def timeline_section(run: RunData) -> PageSection | None:
    """Return one bar per process of the run over wall-clock time; None if no process was recorded."""
    processes = list(_processes(run))[:_MAX_PROCESSES]
    if not processes:
        return None
    begin_s, end_s = min(each.started_s for each in processes), max(each.ended_s for each in processes)
    whole_s = end_s - begin_s
    if whole_s <= 0:
        return None
    rows, used = [], set()
    for number, process in enumerate(processes):
        spans = list(_spans(run, process, processes[number - 1] if number else None))
        used |= {span.kind for span in spans}
        parts = draw_spans(spans, begin_s, whole_s)
        rows.append(BarRow(f"process {number + 1}, {count(int(process.num_ranks), 'rank')}", parts, process.status))
    chart = BarChart(
        f"{count(len(processes), 'process', 'processes')} in {seconds(whole_s)}",
        rows,
        legend=[kind for key, kind in _KINDS.items() if key in used],
        note=f"from {format_time(begin_s)}",
        has_table=True,
        scale=["0 s", seconds(whole_s / 2), seconds(whole_s)],
    )
    blocks: list[Block] = [chart, _process_table(processes)]
    if pauses := list(_pause_rows(run)):
        blocks.append(KeyValueList(pauses))
    return PageSection("timeline", "Timeline", blocks)


def _processes(run: RunData) -> Iterator[_Process]:
    starts: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for each in run.attempts.rows:
        if each.get("event") == "start":
            starts.append((each, {}))
        elif starts and not starts[-1][1]:  # an end without a start, as in a truncated file, is skipped
            starts[-1] = (starts[-1][0], each)
    for number, (start, end) in enumerate(starts):
        started_s, startup_s = finite_or_none(start.get("started_s")), finite_or_none(start.get("startup_s"))
        if started_s is None:
            continue
        first_step_s = started_s + max(0.0, startup_s or 0.0)
        trained_s = _number(start, "trained_s")
        ended_s = finite_or_none(end.get("ended_s"))
        following = starts[number + 1][0] if number + 1 < len(starts) else {}
        lost_s = 0.0
        if following and end and _number(following, "from_step") < _number(end, "step"):
            lost_s = max(0.0, _number(end, "trained_s") - _number(following, "trained_s"))
        yield _Process(
            started_s=started_s,
            first_step_s=first_step_s,
            ended_s=max(first_step_s, _last_seen(run, first_step_s - trained_s) if ended_s is None else ended_s),
            trained_s=trained_s,
            lost_s=lost_s,
            num_ranks=_number(start, "world_size"),
            from_step=_number(start, "from_step"),
            until_step=_number(following, "from_step") if following else inf,
            step=finite_or_none(end.get("step")),
            status=clean_text(str(end.get("how", "no end recorded")).replace("_", " "), 40),
        )


def _number(record: dict[str, Any], key: str) -> float:
    return finite_or_none(record.get(key)) or 0.0


def _last_seen(run: RunData, trained_from_s: float) -> float:
    # Of a process that runs, or was killed without a resume.
    times = [node.series.extents["unix_s"].highest for node in run.nodes if node.series.has_key("unix_s")]
    times += [_number(each, "unix_s") + _number(each, "pause_s") for each in run.pauses.rows[-1:]]
    if run.steps.has_key("trained_s"):
        times.append(trained_from_s + run.steps.extents["trained_s"].last)
    return max(times, default=0.0)


def _spans(run: RunData, process: _Process, before: _Process | None) -> Iterator[Span]:
    """Yield what a process did; later spans are drawn over earlier ones."""
    if before is not None and before.ended_s < process.started_s:
        yield Span(_DOWN, before.ended_s, process.started_s)
    yield Span(START_UP, process.started_s, process.first_step_s)
    yield Span(TRAINING, process.first_step_s, process.ended_s)
    yield from _slow_spans(run, process)
    if process.lost_s:
        yield Span(_REWORK, max(process.first_step_s, process.ended_s - process.lost_s), process.ended_s)
    for each in run.pauses.rows:
        name, begin_s = str(each.get("name")), finite_or_none(each.get("unix_s"))
        if name in _KINDS and begin_s is not None and process.first_step_s - 1 <= begin_s <= process.ended_s:
            yield Span(name, begin_s, min(process.ended_s, begin_s + max(0.0, _number(each, "pause_s"))))


def _slow_spans(run: RunData, process: _Process) -> Iterator[Span]:
    points = [each for each in run.steps.points if "trained_s" in each and each.get("images_per_s", 0.0) > 0]
    if len(points) < 4:
        return
    limit = _SLOW_SHARE * median(each["images_per_s"] for each in points)
    for earlier, later in pairwise(points):
        begin_s, end_s = (process.first_step_s + each["trained_s"] - process.trained_s for each in (earlier, later))
        steps = (earlier.get("step", 0.0), later.get("step", 0.0))
        is_inside = process.first_step_s <= begin_s < end_s <= process.ended_s
        is_of_process = process.from_step <= steps[0] and steps[1] <= process.until_step
        if is_inside and is_of_process and later["images_per_s"] < limit:
            yield Span(_SLOW, begin_s, end_s)


def draw_spans(
    spans: Sequence[Span], begin_s: float, whole_s: float, kinds_shown: Mapping[str, tuple[str, str]] = _KINDS
) -> list[BarSegment]:
    """Return the segments of a row: its time is divided into slots, each of the kind that fills most of it.

    `kinds_shown` has the label and the CSS class of each kind; all but start-up, training and down lie in training.
    """
    slot_s = whole_s / _NUM_SLOTS
    filled: list[dict[str, float]] = [{} for _ in range(_NUM_SLOTS)]
    kinds = [""] * _NUM_SLOTS
    pauses = [each for each in spans if each.kind in (*_PAUSES, EPOCH_BOUNDARY)]
    for span in spans:
        first = min(_NUM_SLOTS - 1, max(0, int((span.begin_s - begin_s) / slot_s)))
        last = min(_NUM_SLOTS - 1, max(first, int((span.end_s - begin_s) / slot_s)))
        for slot in range(first, last + 1):
            low, high = begin_s + slot * slot_s, begin_s + (slot + 1) * slot_s
            covered = max(0.0, min(high, span.end_s) - max(low, span.begin_s))
            if span.kind not in (START_UP, TRAINING, _DOWN):  # these lie within training
                filled[slot][TRAINING] = max(0.0, filled[slot].get(TRAINING, 0.0) - covered)
            filled[slot][span.kind] = filled[slot].get(span.kind, 0.0) + covered
    for slot, parts in enumerate(filled):
        if parts and max(parts.values()) > 0:
            kinds[slot] = max(parts, key=lambda kind: parts[kind])
    if len(pauses) <= _MAX_VISIBLE_PAUSES:
        for pause in pauses:
            kinds[min(_NUM_SLOTS - 1, max(0, int((pause.begin_s - begin_s) / slot_s)))] = pause.kind
    segments: list[BarSegment] = []
    begin = 0
    for slot in range(1, _NUM_SLOTS + 1):
        if slot < _NUM_SLOTS and kinds[slot] == kinds[begin]:
            continue
        kind, share = kinds[begin], (slot - begin) / _NUM_SLOTS
        covered_s = sum(each.get(kind, 0.0) for each in filled[begin:slot])
        label, colour = kinds_shown.get(kind, ("", "c-none"))
        segments.append(BarSegment(label, share, seconds(covered_s), colour))
        begin = slot
    return segments[:-1] if segments[-1].colour == "c-none" else segments


def _process_table(processes: Sequence[_Process]) -> Table:
    rows = [
        [
            cells.count_cell(number),
            cells.time_cell(each.started_s),
            cells.count_cell(each.num_ranks),
            cells.seconds_cell(each.first_step_s - each.started_s),
            cells.count_cell(each.from_step),
            cells.seconds_cell(each.ended_s - each.started_s),
            TableCell(each.ending),
        ]
        for number, each in enumerate(processes, start=1)
    ]
    columns = cells.table_columns(["process", "started"], ["ranks", "start-up", "from step", "up for"])
    return Table("Processes", [*columns, *cells.table_columns(["end"])], rows, 20, f"all {len(rows):,}")


def _pause_rows(run: RunData) -> Iterator[tuple[str, TableCell]]:
    for name in _PAUSES:
        times = [_number(each, "pause_s") for each in run.pauses.rows if each.get("name") == name]
        if times:
            text = f"{len(times):,}, {seconds(sum(times))} in all, the longest {seconds(max(times))}"
            yield f"{_KINDS[name][0]}s", TableCell(text, sum(times))
