"""The document model of a report: sections of paragraphs, tables, charts and images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, Literal

from paceline.report.series import Point

# CSS class of a status or a finding.
Tone = Literal["good", "warning", "bad"]
Severity = Literal["error", "warning", "note"]
_TONES: Final[dict[Severity, Tone]] = {"error": "bad", "warning": "warning", "note": "good"}


@dataclass(frozen=True)
class TableCell:
    """A table cell: `text` to read, and `value` as measured.

    `bar` is a share (0 to 1) drawn behind the text, `swatch` a CSS class, `note` small print such as an interval.
    `is_code` marks text to paste.
    """

    text: str
    value: float | None = None
    bar: float | None = None
    swatch: str = ""
    is_code: bool = False
    note: str = ""


@dataclass(frozen=True)
class TableColumn:
    """A column heading; numbers align right, and a wide column holds sentences."""

    title: str
    is_number: bool = True
    is_wide: bool = False


@dataclass(frozen=True)
class Paragraph:
    """A sentence or two; `is_missing` marks a note on why something is absent."""

    text: str
    is_missing: bool = False
    kind: ClassVar[str] = "paragraph"


@dataclass(frozen=True)
class Command:
    """A shell command to paste."""

    text: str
    kind: ClassVar[str] = "command"


@dataclass(frozen=True)
class Table:
    """Rows of cells; those after the first `num_open` (0: no limit) are folded under `more`.

    `is_folded` folds the whole table under `title`. `has_sum` marks the last row as a total. The first `num_names`
    columns identify a row.
    """

    title: str
    columns: Sequence[TableColumn]
    rows: Sequence[Sequence[TableCell]]
    num_open: int = 0
    more: str = ""
    is_folded: bool = False
    has_sum: bool = False
    num_names: int = 1
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class KeyValueList:
    """A list of names and values."""

    rows: Sequence[tuple[str, TableCell]]
    title: str = ""
    kind: ClassVar[str] = "facts"


@dataclass(frozen=True)
class CodeBlock:
    """A file, folded under `title`."""

    title: str
    text: str
    kind: ClassVar[str] = "code"


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart; `bounds` holds intervals (low, high) by point.

    `label` replaces a name too long for the line's end. Lines of one `group` share a style and one label if the
    chart has too many lines or any `is_dashed` line. Of a few lines, one without a group is a group of its own.
    """

    name: str
    points: Sequence[Point]
    has_markers: bool = False
    group: str = ""
    label: str = ""
    is_dashed: bool = False
    bounds: Mapping[Point, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Chart:
    """Lines over a common x axis.

    The y axis includes `low` and `high` unless None. `rule` is a horizontal reference line: its y and its name. `best`
    marks a point with its text. `x_units` are other units of x by name, each as points (x, value in that unit) in order
    of x. Values on a log axis must be above 0.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[ChartLine]
    low: float | None = 0.0  # None with `log_y`: a log axis has no 0
    high: float | None = None
    note: str = ""
    rule: tuple[float, str] | None = None
    log_x: bool = False
    log_y: bool = False
    best: tuple[Point, str] | None = None
    x_units: Mapping[str, Sequence[Point]] = field(default_factory=dict)

    @property
    def is_curve(self) -> bool:
        """Return whether any line has more than one point; single values read better as text."""
        return any(len(line.points) > 1 for line in self.lines)

    kind: ClassVar[str] = "chart"


@dataclass(frozen=True)
class ChartRow:
    """Charts in a responsive row."""

    charts: Sequence[Chart]
    kind: ClassVar[str] = "charts"


@dataclass(frozen=True)
class BarSegment:
    """A segment of a bar: its `share` of the whole (0 to 1), text, and CSS class."""

    name: str
    share: float
    text: str
    colour: str


@dataclass(frozen=True)
class StackedBar:
    """A stacked bar; `scale` labels its start, middle and end."""

    title: str
    parts: Sequence[BarSegment]
    scale: Sequence[str]
    note: str = ""
    has_legend: bool = True  # off if a table with the same colors follows
    kind: ClassVar[str] = "bar"


@dataclass(frozen=True)
class BarRow:
    """One bar; `parts` and `bounds` (its interval) are shares of the chart's width."""

    name: str
    parts: Sequence[BarSegment]
    text: str
    bounds: tuple[float, float] | None = None


@dataclass(frozen=True)
class BarChart:
    """A bar chart; `legend` pairs a name with a CSS class, and `scale` labels start, middle and end of the bars.

    Markdown omits it if `has_table`: a table repeats it.
    """

    title: str
    rows: Sequence[BarRow]
    legend: Sequence[tuple[str, str]] = ()
    note: str = ""
    has_table: bool = False
    scale: Sequence[str] = ()
    kind: ClassVar[str] = "bars"


@dataclass(frozen=True)
class HeatMap:
    """A confusion matrix: image counts, true classes by row, predicted classes by column."""

    title: str
    names: Sequence[str]
    counts: Sequence[Sequence[int]]
    kind: ClassVar[str] = "heatmap"


@dataclass(frozen=True)
class Thumbnail:
    """A thumbnail as a data URL ("" for none), with a title such as its class.

    `overlays` are shown beside it, as pairs of a data URL and what it shows.
    """

    address: str
    title: str
    details: Sequence[str]
    name: str
    overlays: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Gallery:
    """Thumbnails side by side."""

    title: str
    pictures: Sequence[Thumbnail]
    note: str = ""
    kind: ClassVar[str] = "gallery"


@dataclass(frozen=True)
class Fold:
    """Blocks that HTML folds under `title`."""

    title: str
    blocks: Sequence["Block"]
    kind: ClassVar[str] = "fold"


Block = (
    Paragraph | Command | Table | KeyValueList | CodeBlock | ChartRow | StackedBar | BarChart | HeatMap | Gallery | Fold
)


@dataclass(frozen=True)
class PageSection:
    """A headed part of the report; `key` is its link anchor."""

    key: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class KeyFigure:
    """A key figure in large print."""

    label: str
    cell: TableCell
    note: str = ""

    @property
    def row(self) -> tuple[str, TableCell]:
        """Return the figure as a row of a `KeyValueList`."""
        return self.label, replace(self.cell, note=self.note)


@dataclass(frozen=True)
class BottleneckSummary:
    """The bottleneck of a run; `command` is what to try, "" if paceline suggests none."""

    bottleneck: str
    evidence: str
    ceiling: str
    command: str
    advice: str = ""


@dataclass(frozen=True)
class PageFinding:
    """A finding on `area`, with its evidence, advice, a command to run and the name of a page of the documentation."""

    title: str
    severity: Severity
    area: Literal["health", "speed", "reliability"]
    evidence: str
    advice: str = ""
    command: str = ""
    guide: str = ""

    @property
    def tone(self) -> Tone:
        """Return the tone of the severity."""
        return _TONES[self.severity]

    @property
    def icon(self) -> str:
        """Return a character that shows the severity without color."""
        return {"error": "✕", "warning": "▲", "note": "●"}[self.severity]


@dataclass(frozen=True)
class Tile:
    """A key figure at the top of a page, above a sparkline of `points` or a bar of `parts`."""

    label: str
    cell: TableCell
    note: str = ""
    points: Sequence[Point] = ()
    parts: Sequence[BarSegment] = ()


@dataclass(frozen=True)
class ReportPage:
    """A report; `about` names its kind, `source` the origin of its figures.

    `heading` is the title of the browser's tab, and `chips` are settings that differ from the recipe. `tiles` and
    `findings` are drawn in place of `figures`, `verdict` and `notices`, which a terminal prints with the findings on
    health alone; `passed` names the checks without a finding.

    `summary` holds the blocks that a terminal shows below the key figures, most of them blocks of `sections` too. A
    `KeyValueList` without title that comes first goes on with the key figures.
    """

    title: str
    subtitle: Sequence[str]
    status: str
    tone: Tone
    paceline: str
    figures: Sequence[KeyFigure] = ()
    verdict: BottleneckSummary | None = None
    notices: Sequence[str] = ()
    problems: Sequence[str] = ()
    sections: Sequence[PageSection] = ()
    about: str = "Run report"
    source: str = "the run directory. Numbers are those of result.json, rounded here only"
    summary: Sequence[Block] = ()
    heading: str = ""
    chips: Sequence[str] = ()
    tiles: Sequence[Tile] = ()
    findings: Sequence[PageFinding] = ()
    passed: Sequence[str] = ()

    @property
    def health(self) -> list[PageFinding]:
        """Return the findings on what the model learned."""
        return [finding for finding in self.findings if finding.area == "health"]


@dataclass(frozen=True)
class BriefRow:
    """A row of a brief: lines of pieces, which are not broken; `bar` is drawn before the first line.

    The text of a row that `is_command` may be pasted, and is followed by what it does. `is_cut` cuts a line at
    the end of a terminal's; the first may take two.
    """

    label: str
    lines: Sequence[Sequence[str]]
    bar: Sequence[BarSegment] = ()
    is_command: bool = False
    is_cut: bool = False


@dataclass(frozen=True)
class Brief:
    """The outcome of a verb in a few lines of a terminal: `headline`, with `place` at its end, and rows."""

    headline: Sequence[str]
    tone: Tone
    rows: Sequence[BriefRow]
    place: str = ""
