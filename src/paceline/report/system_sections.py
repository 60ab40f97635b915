"""Report sections on the system: node telemetry, goodput, checkpoints and warnings."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.core.units import byte_unit, count, number, seconds, share
from paceline.report import cells
from paceline.report.cells import TimeUnit, choose_time_unit
from paceline.report.charts import MAX_LINES
from paceline.report.document import (
    Block,
    Chart,
    ChartLine,
    ChartRow,
    KeyValueList,
    PageSection,
    Paragraph,
    Table,
    TableCell,
)
from paceline.report.read_run import MAX_NODES, FirstRecords, NodeSeries, RunData
from paceline.report.run_summary import energy_rows, goodput_parts, reliability_rows
from paceline.report.series import time_weighted_mean
from paceline.report.text import clean_text, finite_or_none

_NUM_OPEN_ATTEMPTS = 20


@dataclass(frozen=True)
class _Quantity:
    """A chart: its title, keys and names of its lines, divisor of its values, and unit."""

    title: str
    lines: Sequence[tuple[str, str]]
    scale: float
    unit: str
    low: float | None = 0.0
    high: float | None = None


_NODE_QUANTITIES: Final = (
    _Quantity("CPU", [("cpu", "all"), ("others_cpu", "other programs")], 0.01, "% of the ranks' cores", high=100.0),
    _Quantity("Memory", [("memory_bytes", "node"), ("ranks_memory_bytes", "ranks")], 0.0, ""),
    _Quantity("Disk", [("disk_read_bytes_per_s", "read"), ("disk_written_bytes_per_s", "written")], 0.0, "/s"),
    _Quantity("Network", [("net_received_bytes_per_s", "received"), ("net_sent_bytes_per_s", "sent")], 0.0, "/s"),
)
_GPU_QUANTITIES: Final = (
    _Quantity("GPU utilization", [("utilisation", "")], 0.01, "%", high=100.0),
    _Quantity("GPU memory", [("memory_used_bytes", "")], 0.0, ""),
    _Quantity("GPU power", [("power_w", "")], 1.0, "W"),
    _Quantity("GPU clock", [("sm_clock_mhz", "")], 1.0, "MHz", low=None),
    _Quantity("GPU temperature", [("temperature_c", "")], 1.0, "°C", low=None),
)


def telemetry_section(run: RunData) -> PageSection:
    """Return a chart per quantity, or why there are none."""
    times = [node.series.extents["unix_s"] for node in run.nodes if node.series.has_key("unix_s")]
    if not times:
        return PageSection("telemetry", "The machine over time", [cells.missing_paragraph(_explain_no_telemetry(run))])
    begin = min(each.lowest for each in times)
    clock = choose_time_unit(max(each.highest for each in times) - begin)
    charts = [*_quantity_charts(_NODE_QUANTITIES, run.nodes, _node_lines, begin, clock)]
    charts += _quantity_charts(_GPU_QUANTITIES, run.nodes, _gpu_lines, begin, clock)
    blocks: list[Block] = [ChartRow(charts)] if charts else [cells.missing_paragraph("Telemetry has no known values.")]
    return PageSection("telemetry", "The machine over time", [*blocks, *_telemetry_notes(run)])


LineNames = Callable[[NodeSeries, _Quantity, bool], Iterable[tuple[str, str, str]]]


def _quantity_charts(
    quantities: Sequence[_Quantity], nodes: Sequence[NodeSeries], names: LineNames, begin: float, clock: TimeUnit
) -> list[Chart]:
    charts = []
    for quantity in quantities:
        keys = [(node, *each) for node in nodes for each in names(node, quantity, len(nodes) > 1)]
        keys = [each for each in keys if each[0].series.xy_points("unix_s", each[1])]
        if not keys:
            continue
        extents = [node.series.extents[key] for node, key, _, _ in keys]
        scale, unit = _scale_and_unit(quantity, max(each.highest for each in extents))
        lines = [
            ChartLine(
                name,
                [(clock.convert(x - begin), y / scale) for x, y in node.series.xy_points("unix_s", key)],
                group=group,
            )
            for node, key, name, group in keys
        ]
        note = f"peak {number(max(each.highest for each in extents) / scale)}"
        if len(quantity.lines) == 1:
            means = [time_weighted_mean(line.points) for line in lines]
            note = f"mean {number(sum(means) / len(means))}, {note}"
        shown = f"{note}; {MAX_LINES} of {len(lines)} shown" if len(lines) > MAX_LINES else note
        charts.append(Chart(quantity.title, clock.unit, unit, lines, quantity.low, quantity.high, shown))
    return charts


def _scale_and_unit(quantity: _Quantity, highest: float) -> tuple[float, str]:
    if quantity.scale:
        return quantity.scale, quantity.unit
    unit, scale = byte_unit(highest)
    return scale, f"{unit}{quantity.unit}"


def _node_lines(node: NodeSeries, quantity: _Quantity, has_many: bool) -> Iterable[tuple[str, str, str]]:
    for key, name in quantity.lines:
        yield key, f"node {node.number} {name}".strip() if has_many else name or quantity.title, name


def _gpu_lines(node: NodeSeries, quantity: _Quantity, has_many: bool) -> Iterable[tuple[str, str, str]]:
    for index in sorted(node.gpus):
        for key, _ in quantity.lines:
            yield f"gpu{index}.{key}", f"{node.number}: GPU {index}" if has_many else f"GPU {index}", ""


def _telemetry_notes(run: RunData) -> list[Block]:
    notes: list[Block] = []
    if run.result is not None and (rows := [*energy_rows(run.result)]):
        notes.append(KeyValueList(rows))
    if any(node.gpus for node in run.nodes):
        notes.append(Paragraph("The charts show all GPUs of the node, including other programs' load."))
    elif run.result is None or run.result.provenance.get("device") != "cpu":
        why = _recorded_reason(run) or "the node has none, or nvidia-ml-py is not installed"
        notes.append(cells.missing_paragraph(f"No GPU was recorded: {why}."))
    sampled = [node.series.num_records for node in run.nodes if node.series.is_sample]
    if sampled:
        read = f"paceline read at most {max(sampled):,} samples per node, spread evenly from the first to the last"
        notes.append(cells.missing_paragraph(f"Telemetry is long: {read}, and may miss peaks between them."))
    if run.num_nodes > MAX_NODES:
        notes.append(cells.missing_paragraph(f"The first {MAX_NODES} of {run.num_nodes} nodes are shown."))
    return notes


def _recorded_reason(run: RunData) -> str:
    return clean_text(run.result.provenance.get("telemetry_missing") or "", 300) if run.result is not None else ""


def _explain_no_telemetry(run: RunData) -> str:
    every = run.settings.get("measure.telemetry", "")
    if every == "off":
        return "The machine was not recorded: measure.telemetry is off."
    if run.result is None:  # it may be training, or have been killed
        return f"There is no sample of the machine yet ({every})."
    why = _recorded_reason(run) or f"the run ended before the first sample ({every})"
    return f"The machine was not recorded: {why}."


def reliability_section(run: RunData) -> PageSection | None:
    """Return goodput, checkpoints, warnings and bad images; None for one uninterrupted process without any trouble."""
    if not _has_trouble(run):
        return None
    result = run.result
    blocks: list[Block] = []
    if result is not None and result.goodput is not None and result.goodput.wall_s > 0:
        goodput = result.goodput
        title = (
            f"Goodput over {count(goodput.starts, 'start')}: "
            f"{seconds(goodput.useful_s)} of {seconds(goodput.wall_s)} were steps that count"
        )
        note = f"goodput {share(goodput.share)}"
        blocks.append(cells.time_bar(title, goodput_parts(goodput), goodput.wall_s, note=note))
    if result is not None:
        blocks.append(KeyValueList([*reliability_rows(result)]))
    blocks += _warning_tables(run.warnings)
    return PageSection("upkeep", "Reliability", [*blocks, *_bad_image_tables(run.bad_images)])


def _has_trouble(run: RunData) -> bool:
    result = run.result
    num_starts = sum(each.get("event") == "start" for each in run.attempts.rows)
    if num_starts > 1 or run.warnings.total or run.bad_images.total:
        return True
    if result is None:
        return False
    has_failed_save = result.checkpoints is not None and result.checkpoints.failed > 0
    has_ended_early = result.status in ("preempted", "failed")
    return has_failed_save or has_ended_early or bool(result.skipped_steps or result.bad_images)


def _time_cell(record: dict[str, Any], key: str) -> TableCell:
    return cells.time_cell(finite_or_none(record.get(key)))


def _warning_tables(records: FirstRecords) -> list[Block]:
    if not records.total:
        return []
    rows = [[_time_cell(each, "unix_s"), TableCell(clean_text(each.get("message", ""), 500))] for each in records.rows]
    columns = cells.table_columns(["when", "warning"])
    title = (
        f"Warnings ({records.total:,})"
        if records.total == len(rows)
        else f"The first {len(rows)} of {records.total:,} warnings"
    )
    return [Table(title, columns, rows, 10, f"all {len(rows)}")]


def _bad_image_tables(records: FirstRecords) -> list[Block]:
    if not records.total:
        return []
    rows = [
        [
            cells.text_cell(each.get("split", "")),
            cells.text_cell(each.get("path", each.get("name", "")), 200),
            cells.text_cell(each.get("reason", ""), 200),
        ]
        for each in records.rows
    ]
    columns = cells.table_columns(["split", "image", "why it was left out"])
    return [Table(f"Images that could not be read ({records.total:,})", columns, rows, 5, f"{len(rows)} of them")]
