"""Share parts among experiment pages: rows of results, rate bars, measured curves and provenance."""

import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from paceline import __version__
from paceline.core.experiments.results import (
    BatchPoint,
    LadderResult,
    LearnResult,
    ParityResult,
    RungResult,
    ScalePoint,
    ScaleResult,
    SweepPoint,
    SweepResult,
    TuneResult,
)
from paceline.core.json_file import ResultModel
from paceline.core.metric import format_metric
from paceline.core.statistics import Interval
from paceline.core.units import count, per_second
from paceline.report import cells
from paceline.report.document import (
    BarChart,
    BarRow,
    BarSegment,
    Block,
    BottleneckSummary,
    Chart,
    ChartLine,
    ChartRow,
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
MAX_COMMAND_CHARS: Final = 4000
_MAX_BOUND_RATIO: Final = 1.5
_SHOWN_ELSEWHERE: Final = ("command",)

Record = dict[str, Any]
"""A row of a result: its values by the key of their column, None or missing if not measured."""


@dataclass(frozen=True)
class Column:
    """A column of results: its name in CSV, its heading in tables, and how it shows a value.

    `has_interval` marks values that are an `Interval` or None; in CSV these are four columns.
    """

    key: str
    heading: str = ""
    cell: Callable[[Any], TableCell] = cells.sentence_cell
    has_interval: bool = False
    is_wide: bool = False
    in_csv: bool = True

    @property
    def is_number(self) -> bool:
        """Return whether the values align right: neither names nor sentences."""
        return not self.is_wide and self.cell is not cells.sentence_cell


PARITY_COLUMNS: Final = (
    Column("parity", "loss is"),
    Column("loss", "loss", cells.loss_cell),
    Column("loss_below", "loss below", cells.loss_cell),
    Column("loss_gap", "difference", cells.change_cell, has_interval=True),
    Column("tolerance", "tolerance", cells.share_cell, in_csv=False),
    Column("parity_why", "why", is_wide=True, in_csv=False),
)
PARITY_KEYS: Final = "loss_below loss loss_gap tolerance parity parity_why"
SPREAD_COLUMNS: Final = (Column("images_per_s_lowest"), Column("images_per_s_highest"))


@dataclass(frozen=True)
class ResultRows:
    """The rows of a result, with all their columns; `main` has the keys of the table `title`, blank-separated.

    `more` names further rows. The first `num_names` columns of `main` identify a row.
    """

    columns: Sequence[Column]
    records: Sequence[Record]
    title: str = ""
    main: str = ""
    more: str = "more rows"
    num_names: int = 1

    def main_table(self) -> Table:
        """Return the main columns, rounded."""
        return self.table(self.main, title=self.title, num_names=self.num_names)

    def table(
        self, keys: str, *more_keys: str, title: str = "", having: Collection[str] = (), num_names: int = 1
    ) -> Table:
        """Return the columns `keys`, blank-separated, and `more_keys`, without those that are empty.

        With `having`, it has the rows with a value for any key in it.
        """
        by_key = {column.key: column for column in self.columns}
        columns = [by_key[key] for key in (*keys.split(), *more_keys)]
        records = [
            record for record in self.records if not having or any(record.get(key) not in (None, "") for key in having)
        ]
        rows = [[column.cell(record.get(column.key)) for column in columns] for record in records]
        used = [index for index in range(len(columns)) if index < num_names or any(row[index].text for row in rows)]
        headings = [
            TableColumn(columns[index].heading, columns[index].is_number, columns[index].is_wide) for index in used
        ]
        return Table(
            title,
            headings,
            [[row[index] for index in used] for row in rows],
            MAX_OPEN_ROWS,
            self.more,
            num_names=num_names,
        )


def build_record(row: ResultModel, **more: Any) -> Record:
    """Return the fields of a row and `more`; spread, parity and stages become fields of their own."""
    record = dict(row)
    low, high = record.pop("spread", None) or (None, None)
    record |= {"images_per_s_lowest": low, "images_per_s_highest": high}
    parity: ParityResult | None = record.pop("parity", None)
    if parity is not None:
        record |= {"parity": parity.verdict, "loss": parity.loss, "loss_below": parity.loss_below}
        record |= {"loss_gap": parity.gap, "tolerance": parity.tolerance, "parity_why": parity.why}
    record |= {f"stage_{name}_s": value_s for name, value_s in record.pop("stages", {}).items()}
    return record | more


def stage_columns(rows: Iterable[RungResult | SweepPoint]) -> list[Column]:
    """Return the columns of all stages of `rows`, in the order of a step."""
    names = dict.fromkeys(name for row in rows for name in row.stages)
    return [Column(f"stage_{name}_s", cells.stage_label(name), step_ms_cell) for name in names]


def step_ms_cell(value_s: float | None) -> TableCell:
    """Return seconds per step as milliseconds without the unit."""
    return cells.EMPTY_CELL if value_s is None else TableCell(f"{1000 * value_s:,.2f}", value_s)


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
        summary: Sequence[Block] = (),
    ) -> ReportPage:
        """Return the page without sections that are None; a terminal shows `summary`."""
        return ReportPage(
            title=self.name,
            subtitle=[clean_text(each) for each in subtitle if each],
            status=status[0],
            tone=status[1],
            figures=figures,
            verdict=verdict,
            problems=self.problems,
            sections=[section for section in sections if section is not None],
            paceline=__version__,
            about=about,
            source="the experiment's folder. Numbers are those of experiment.json, rounded here only",
            summary=summary,
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
    """A bar: its name, length with interval, and CSS class."""

    name: str
    rate: Interval
    colour: str


def shell_command(arguments: Sequence[str]) -> Command:
    """Return a command to paste."""
    return Command(clean_text(shlex.join(arguments), MAX_COMMAND_CHARS))


def train_command(result: TuneResult | LearnResult) -> Command:
    """Return the command that trains the recipe that a search has written."""
    trust_code = ["--trust-code"] if result.provenance.get("own_parts") else []
    return shell_command(["paceline", "train", result.recipe_file, "--ranks", str(result.ranks), *trust_code])


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
    text = per_second(each.rate.value)
    return BarRow(each.name, [BarSegment(each.name, max(0.0, value / top), text, each.colour)], text, bounds)


def describe_bounds(interval: Interval | None) -> str:
    """Return `1.19 to 1.28 with 95 % confidence`, or a note on a single measurement."""
    if interval is None or interval.low is None or interval.high is None:
        return "measured once, so its scatter is unknown"
    return f"{interval.low:,.2f} to {interval.high:,.2f} {CONFIDENCE_TEXT}"


def metric_texts(metric: str, interval: Interval) -> tuple[TableCell, str]:
    """Return the value of a metric, and `91.20 % to 92.80 % with 95 % confidence`, "" for a single measurement."""
    bounds = cells.format_bounds(interval, partial(format_metric, metric))
    cell = TableCell(format_metric(metric, interval.value), interval.value)
    return cell, f"{bounds} {CONFIDENCE_TEXT}" if bounds else ""


def chart_line(
    name: str, values: Iterable[tuple[float, cells.Quantity]], group: str = "", *, marked: bool = True
) -> ChartLine:
    """Return a line in order of x with its intervals, of finite values only."""
    points: list[Point] = []
    bounds: dict[Point, tuple[float, float]] = {}
    for x, each in sorted(values, key=lambda pair: pair[0]):
        interval = each if isinstance(each, Interval) else None
        value = finite_or_none(interval.value if interval is not None else each)
        if value is None:
            continue
        points.append((x, value))
        low, high = (None, None) if interval is None else map(finite_or_none, (interval.low, interval.high))
        if low is not None and high is not None:
            bounds[x, value] = (low, high)
    return ChartLine(name, points, has_markers=marked, group=group, bounds=bounds)


def to_percent(share: cells.Quantity) -> cells.Quantity:
    """Return a share in percent."""
    if isinstance(share, Interval):
        low, high = (None if each is None else 100 * each for each in (share.low, share.high))
        return Interval(value=100 * share.value, low=low, high=high, n=share.n)
    return None if share is None else 100 * share


def measurement_facts(result: LadderResult | ScaleResult | TuneResult | SweepResult) -> list[tuple[str, TableCell]]:
    """Return how much was measured, and the time of all runs."""
    short = [
        ("measured steps per run", cells.count_cell(result.steps)),
        ("warm-up steps", cells.count_cell(result.warmup_steps)),
        ("interleaved runs of each", cells.count_cell(result.repeats)),
    ]
    return [*(short if result.steps else []), ("total time of runs", cells.seconds_cell(result.wall_s))]


def measurement_status(
    points: Sequence[ScalePoint | BatchPoint | SweepPoint], noun: str, caution: str
) -> tuple[str, Tone]:
    """Return how many points were measured, or how many failed."""
    failed = sum(bool(point.error) for point in points)
    if failed:
        return f"{failed} of {len(points)} {noun}s failed", "bad" if failed == len(points) else "warning"
    if caution:
        return "measured, with a caution", "warning"
    return f"{count(len(points), noun)} measured", "good"


def caution_paragraphs(caution: str) -> list[Block]:
    """Return why the measurements may mislead, if they may."""
    return [Paragraph(f"Caution: {clean_text(caution, 1000)}")] if caution else []


def ranks_chart(
    title: str,
    unit: str,
    lines: Sequence[ChartLine],
    low: float | None = 0.0,
    rule: tuple[float, str] | None = None,
    *,
    log_y: bool = False,
) -> Chart:
    """Return a chart over numbers of ranks."""
    return Chart(title, "ranks", unit, lines, low=None if log_y else low, rule=rule, log_x=True, log_y=log_y)


def drawn_charts(charts: Iterable[Chart]) -> list[Chart]:
    """Return the charts that have a point, without empty lines."""
    drawn = [replace(chart, lines=[line for line in chart.lines if line.points]) for chart in charts]
    # An ideal line alone shows nothing.
    return [chart for chart in drawn if any(line.name != "ideal" for line in chart.lines)]


def chart_row(charts: Iterable[Chart], nothing: str) -> list[Block]:
    """Return the charts that have a point; or the note `nothing` unless it is ""."""
    if drawn := drawn_charts(charts):
        return [ChartRow(drawn)]
    return [cells.missing_paragraph(nothing)] if nothing else []
