"""Report node telemetry over time: CPU, memory, GPUs, disk and network."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.units import byte_unit, number
from paceline.report.blocks import Block, Chart, ChartLine, ChartRow, PageSection, Paragraph
from paceline.report.files import find_setting
from paceline.report.gaps import time_weighted_mean
from paceline.report.plot import MAX_LINES
from paceline.report.run import MAX_NODES, NodeSeries, RunData
from paceline.report.sections import cells
from paceline.report.sections.clock import TimeUnit, choose_time_unit
from paceline.report.words import clean_text


@dataclass(frozen=True)
class _Quantity:
    """A chart: its title, the keys and names of its lines, the divisor of its values, and their unit.

    A `scale` of 0 chooses the byte unit that fits the highest value.
    """

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
    _Quantity("GPU utilisation", [("utilisation", "")], 0.01, "%", high=100.0),
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
    every = find_setting(run.recipe, "measure", "telemetry")
    if every == "off":
        return "The machine was not recorded: measure.telemetry is off."
    if not every:
        return "The machine was not recorded: an older version of paceline made the run."
    why = _recorded_reason(run) or f"psutil is not installed, or the run ended before the first sample ({every})"
    return f"The machine was not recorded: {why}."
