"""What a report is made of, whatever it is written as: sections of paragraphs, tables, charts and pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from paceline.report.thin import Point


@dataclass(frozen=True)
class Cell:
    """A place in a table: text, and where it shows a number that number as it was measured.

    `bar` is a share to draw behind it, `swatch` the colour of a part of a bar, `is_code` what can be pasted. `note` is
    what stands below it in small print, such as an interval.
    """

    text: str
    value: float | None = None
    bar: float | None = None
    swatch: str = ""
    is_code: bool = False
    note: str = ""


@dataclass(frozen=True)
class Column:
    """A heading; numbers stand to the right. One that holds sentences is wide."""

    title: str
    is_number: bool = True
    is_wide: bool = False


@dataclass(frozen=True)
class Paragraph:
    """A sentence or two; `is_missing` when it says that, and why, something is not there."""

    text: str
    is_missing: bool = False
    kind: ClassVar[str] = "paragraph"


@dataclass(frozen=True)
class Command:
    """Something to paste into a shell."""

    text: str
    kind: ClassVar[str] = "command"


@dataclass(frozen=True)
class Table:
    """Rows of cells. Those after the first `num_open`, if that is not 0, are folded away under `more`; with
    `is_folded` all are, under `title`. `has_sum` says that the last row adds up the others."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    num_open: int = 0
    more: str = ""
    is_folded: bool = False
    has_sum: bool = False
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Facts:
    """Names and values, one under the other."""

    rows: Sequence[tuple[str, Cell]]
    title: str = ""
    kind: ClassVar[str] = "facts"


@dataclass(frozen=True)
class Code:
    """A file to read, folded away under `title`."""

    title: str
    text: str
    kind: ClassVar[str] = "code"


@dataclass(frozen=True)
class Line:
    """A curve. Its points are marked where they are `marked`, as each of them is a measurement of its own.

    Where a chart has too many lines to tell apart, those of one `group` look alike, and its name is told once; so they
    do where some of them are `dashed`, such as what was measured on training images beside what was on others. `label`
    stands at the line's end in place of a name that is too long, which a legend has in full. `bounds` are the intervals
    in which points lie, low and high, by point.
    """

    name: str
    points: Sequence[Point]
    marked: bool = False
    group: str = ""
    label: str = ""
    dashed: bool = False
    bounds: Mapping[Point, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Chart:
    """Curves over a common x. `low` and `high` are what the y axis shows at least, None as the values have it.

    `note` is a few words on the figures, and `rule` a level to compare with: its y and its name. On an axis with
    `log_x` or `log_y` a doubling is as long everywhere; what is drawn there is above 0, and `low` is None.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    low: float | None = 0.0
    high: float | None = None
    note: str = ""
    rule: tuple[float, str] | None = None
    log_x: bool = False
    log_y: bool = False
    kind: ClassVar[str] = "chart"


@dataclass(frozen=True)
class Charts:
    """Charts side by side, as many as there is room for."""

    charts: Sequence[Chart]
    kind: ClassVar[str] = "charts"


@dataclass(frozen=True)
class Part:
    """A part of a bar: `share` of the whole, 0 to 1, and the value as text; `colour` is a class of the style sheet."""

    name: str
    share: float
    text: str
    colour: str


@dataclass(frozen=True)
class Bar:
    """Parts of a whole, side by side; `scale` is its beginning, middle and end. A legend is left out
    where a table follows that has the same colours."""

    title: str
    parts: Sequence[Part]
    scale: Sequence[str]
    note: str = ""
    has_legend: bool = True
    kind: ClassVar[str] = "bar"


@dataclass(frozen=True)
class BarRow:
    """A bar among others, of `parts` whose shares are of the longest one's room, with its value as `text`.

    `bounds` is the interval in which its end lies, as shares of the same.
    """

    name: str
    parts: Sequence[Part]
    text: str
    bounds: tuple[float, float] | None = None


@dataclass(frozen=True)
class Bars:
    """Bars one under the other, to compare; `legend` names colours of parts. `note` is a few words on the figures.

    `has_table` says that a table follows with what the parts are; where bars are no drawing, they are left out then.
    """

    title: str
    rows: Sequence[BarRow]
    legend: Sequence[tuple[str, str]] = ()
    note: str = ""
    has_table: bool = False
    kind: ClassVar[str] = "bars"


@dataclass(frozen=True)
class HeatMap:
    """Counts of images, a row a true class and a column a predicted one."""

    title: str
    names: Sequence[str]
    counts: Sequence[Sequence[int]]
    kind: ClassVar[str] = "heatmap"


@dataclass(frozen=True)
class Picture:
    """A thumbnail as a data: address ("" where there is none), what it is taken for, and what is known of it."""

    address: str
    true: str
    predicted: str
    details: Sequence[str]
    name: str


@dataclass(frozen=True)
class Gallery:
    """Pictures side by side."""

    title: str
    pictures: Sequence[Picture]
    kind: ClassVar[str] = "gallery"


Tone = Literal["good", "warning", "bad"]
"""Colour that marks a status or a finding."""

Block = Paragraph | Command | Table | Facts | Code | Charts | Bar | Bars | HeatMap | Gallery


@dataclass(frozen=True)
class Section:
    """A part of the report under a heading; `key` names it in links."""

    key: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Figure:
    """A number in large print: what it is, as text, as measured, and what to know of it."""

    label: str
    cell: Cell
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """What held the run back, and what would help: a `command` to paste, "" when none was earned."""

    bottleneck: str
    evidence: str
    ceiling: str
    command: str
    advice: str = ""


@dataclass(frozen=True)
class HealthFinding:
    """Something wrong with what was learnt, and what to do about it."""

    title: str
    severity: Literal["error", "warning", "note"]
    evidence: str
    advice: str

    @property
    def tone(self) -> Tone:
        """The colour that it is marked with."""
        match self.severity:
            case "error":
                return "bad"
            case "warning":
                return "warning"
            case "note":
                return "good"


@dataclass(frozen=True)
class Page:
    """A whole report; `about` is what it is of, in a word or two, and `source` where its figures are from."""

    title: str
    subtitle: Sequence[str]
    status: str
    tone: Tone
    figures: Sequence[Figure]
    verdict: Verdict | None
    notices: Sequence[str]
    problems: Sequence[str]
    sections: Sequence[Section]
    paceline: str
    about: str = "Run report"
    source: str = "the run directory. Figures are those of result.json, rounded here only"
    health: Sequence[HealthFinding] = ()
