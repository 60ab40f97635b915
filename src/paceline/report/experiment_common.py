"""Share blocks among experiment pages: rate bars, measured curves, parity cells and provenance."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline import __version__
from paceline.core.experiments.results import ParityResult
from paceline.core.statistics import Interval
from paceline.report import cells
from paceline.report.document import (
    BarChart,
    BarRow,
    BarSegment,
    Block,
    BottleneckSummary,
    ChartLine,
    CodeBlock,
    Command,
    KeyFigure,
    KeyValueList,
    PageSection,
    Paragraph,
    ReportPage,
    Table,
    TableCell,
    TableColumn,
    Tone,
)
from paceline.report.series import Point
from paceline.report.text import clean_lines, clean_text, finite_or_none

CONFIDENCE_TEXT: Final = "with 95 % confidence"
# Rows of a table that are open; the rest is folded.
MAX_OPEN_ROWS: Final = 40
_MAX_COMMAND_CHARS: Final = 4000
_MAX_BOUND_RATIO: Final = 1.5
_SHOWN_ELSEWHERE: Final = ("command",)
# Columns of `parity_cells`.
PARITY_COLUMNS: Final = (
    TableColumn("loss below"),
    TableColumn("loss"),
    TableColumn("difference"),
    TableColumn("tolerance"),
    TableColumn("loss is", is_number=False),
    TableColumn("why", is_number=False, is_wide=True),
)


@dataclass(frozen=True)
class ExperimentReport:
    """The folder of an experiment, and the recipe it varies ("" for none).

    `problems` has a line per unreadable file.
    """

    path: Path
    recipe: str = ""
    problems: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Return the folder's name, which starts with the experiment's."""
        return clean_text(self.path.resolve().name)

    def build_page(
        self,
        about: str,
        status: tuple[str, Tone],
        subtitle: Sequence[str],
        figures: Sequence[KeyFigure],
        sections: Iterable[PageSection | None],
        verdict: BottleneckSummary | None = None,
    ) -> ReportPage:
        """Return the page without sections that are None."""
        return ReportPage(
            title=self.name,
            subtitle=[clean_text(each) for each in subtitle if each],
            status=status[0],
            tone=status[1],
            figures=figures,
            verdict=verdict,
            notices=(),
            problems=self.problems,
            sections=[section for section in sections if section is not None],
            paceline=__version__,
            about=about,
            source="the experiment's folder. Figures are those of experiment.json, rounded here only",
        )

    def build_provenance(
        self,
        command: Sequence[str],
        facts: Sequence[tuple[str, TableCell]],
        provenance: dict[str, Any],
        runs: Iterable[tuple[str, Sequence[str]]] = (),
    ) -> PageSection:
        """Return the provenance section: command, options, machine, recipe and folders of runs."""
        blocks: list[Block] = []
        if command:
            blocks += [Paragraph("The command:"), shell_command(command)]
        blocks += [KeyValueList(facts, "What was measured")] if facts else []
        known = {key: value for key, value in provenance.items() if key not in _SHOWN_ELSEWHERE}
        blocks += [KeyValueList(cells.key_values(known), "Machine and versions")] if known else []
        blocks += [CodeBlock("Recipe that was varied (recipe.yaml)", clean_lines(self.recipe))] if self.recipe else []
        rows = [
            [cells.sentence_cell(name), TableCell(clean_text(", ".join(places), 2000))]
            for name, places in runs
            if places
        ]
        columns = [TableColumn("measured", is_number=False), TableColumn("folders", is_number=False)]
        blocks += [Table("Folders of the runs", columns, rows, is_folded=True)] if rows else []
        return PageSection(
            "origin", "Provenance", blocks or [cells.missing_paragraph("The experiment recorded no provenance.")]
        )


@dataclass(frozen=True)
class RateBar:
    """A bar: its name, length with interval, text, and CSS class."""

    name: str
    rate: Interval
    text: str
    colour: str


def shell_command(arguments: Sequence[str]) -> Command:
    """Return a command to paste."""
    return Command(clean_text(shlex.join(arguments), _MAX_COMMAND_CHARS))


def rate_bars(title: str, note: str, bars: Sequence[RateBar], legend: Sequence[tuple[str, str]] = ()) -> BarChart:
    """Return bars from 0 with their intervals."""
    values = [value for each in bars if (value := finite_or_none(each.rate.value)) is not None and value > 0]
    most = max(values, default=1.0)
    # An interval far beyond all values would leave no room for these: clip it at the edge.
    top = min(
        _MAX_BOUND_RATIO * most,
        max([most, *(high for each in bars if (high := finite_or_none(each.rate.high)) is not None)]),
    )
    used = {each.colour for each in bars}
    return BarChart(title, [_rate_row(each, top) for each in bars], [each for each in legend if each[1] in used], note)


def _rate_row(each: RateBar, top: float) -> BarRow:
    value = finite_or_none(each.rate.value) or 0.0
    low, high = finite_or_none(each.rate.low), finite_or_none(each.rate.high)
    bounds = None if low is None or high is None else (max(0.0, low / top), min(1.0, high / top))
    return BarRow(each.name, [BarSegment(each.name, max(0.0, value / top), each.text, each.colour)], each.text, bounds)


def bottleneck_of(whose: str, recorded: Mapping[str, str]) -> BottleneckSummary | None:
    """Return the bottleneck of `whose` runs; None if unknown."""
    if not recorded.get("bottleneck"):
        return None
    texts = {key: clean_text(value, 500) for key, value in recorded.items()}
    ceiling = f"Ceiling: {texts['ceiling'].rstrip('.')}." if texts.get("ceiling") else ""
    return BottleneckSummary(
        f"{whose}: {texts['bottleneck']}", texts.get("evidence", ""), ceiling, "", texts.get("try", "")
    )


def describe_bounds(interval: Interval | None) -> str:
    """Return `1.19 to 1.28 with 95 % confidence`, or a note on a single measurement."""
    if interval is None or interval.low is None or interval.high is None:
        return "measured once, so its scatter is unknown"
    return f"{interval.low:,.2f} to {interval.high:,.2f} {CONFIDENCE_TEXT}"


def measured_line(name: str, values: Iterable[tuple[float, Interval | None]], group: str = "") -> ChartLine:
    """Return a line of markers in order of x, of finite values only."""
    points: list[Point] = []
    bounds: dict[Point, tuple[float, float]] = {}
    for x, each in sorted(values, key=lambda pair: pair[0]):
        value = None if each is None else finite_or_none(each.value)
        if each is None or value is None:
            continue
        points.append((x, value))
        low, high = finite_or_none(each.low), finite_or_none(each.high)
        if low is not None and high is not None:
            bounds[x, value] = (low, high)
    return ChartLine(name, points, has_markers=True, group=group, bounds=bounds)


def plain_line(name: str, values: Iterable[tuple[float, float | None]], *, marked: bool = True) -> ChartLine:
    """Return a line without intervals in order of x, of finite values only."""
    points = {(x, value) for x, each in values if (value := finite_or_none(each)) is not None}
    return ChartLine(name, sorted(points), has_markers=marked)


def scale_interval(interval: Interval | None, factor: float) -> Interval | None:
    """Return an interval times `factor`."""
    if interval is None:
        return None
    low, high = (None if each is None else factor * each for each in (interval.low, interval.high))
    return Interval(value=factor * interval.value, low=low, high=high, n=interval.n)


def parity_cells(parity: ParityResult) -> list[TableCell]:
    """Return both losses, their difference and tolerance, the outcome and its reason."""
    return [
        cells.loss_cell(parity.loss_below),
        cells.loss_cell(parity.loss),
        cells.change_cell(parity.gap),
        cells.share_cell(parity.tolerance),
        cells.text_cell(parity.verdict),
        cells.sentence_cell(parity.why),
    ]
