"""Share the frame of experiment pages: bars with intervals, and provenance."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline import __version__
from paceline.core.interval import Interval
from paceline.report.blocks import (
    BarRow,
    Bars,
    Block,
    Cell,
    Code,
    Column,
    Command,
    Facts,
    Figure,
    Page,
    Paragraph,
    Part,
    Section,
    Table,
    Tone,
    Verdict,
)
from paceline.report.sections import cells, intervals
from paceline.report.words import clean, clean_lines, finite

SURE: Final = "with 95 % confidence"
# Rows of a table that are open; the rest is folded.
MANY: Final = 40
_LONGEST_COMMAND: Final = 4000
_FAR: Final = 1.5
_TOLD_ELSEWHERE: Final = ("command",)


@dataclass(frozen=True)
class Told:
    """The context of an experiment's report: its folder, and the recipe it varies ("" for none).

    `problems` has a line per unreadable file.
    """

    path: Path
    recipe: str = ""
    problems: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Return the folder's name, which starts with the experiment's."""
        return clean(self.path.resolve().name)

    def page(
        self,
        about: str,
        status: tuple[str, Tone],
        subtitle: Sequence[str],
        figures: Sequence[Figure],
        sections: Iterable[Section | None],
        verdict: Verdict | None = None,
    ) -> Page:
        """Return the page without sections that are None."""
        return Page(
            title=self.name,
            subtitle=[clean(each) for each in subtitle if each],
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

    def origin(
        self,
        command: Sequence[str],
        facts: Sequence[tuple[str, Cell]],
        provenance: dict[str, Any],
        runs: Iterable[tuple[str, Sequence[str]]] = (),
    ) -> Section:
        """Return the provenance section: command, options, machine, recipe and folders of runs."""
        blocks: list[Block] = []
        if command:
            blocks += [Paragraph("The command:"), shell(command)]
        blocks += [Facts(facts, "What was measured")] if facts else []
        known = {key: value for key, value in provenance.items() if key not in _TOLD_ELSEWHERE}
        blocks += [Facts(cells.facts_of(known), "Machine and versions")] if known else []
        blocks += [Code("Recipe that was varied (recipe.yaml)", clean_lines(self.recipe))] if self.recipe else []
        rows = [[intervals.sentence(name), Cell(clean(", ".join(places), 2000))] for name, places in runs if places]
        columns = [Column("measured", is_number=False), Column("folders", is_number=False)]
        blocks += [Table("Folders of the runs", columns, rows, is_folded=True)] if rows else []
        return Section("origin", "Provenance", blocks or [cells.missing("The experiment recorded no provenance.")])


@dataclass(frozen=True)
class Rate:
    """A bar: its name, length with interval, text, and CSS class."""

    name: str
    rate: Interval
    text: str
    colour: str


def shell(arguments: Sequence[str]) -> Command:
    """Return a command to paste."""
    return Command(clean(shlex.join(arguments), _LONGEST_COMMAND))


def rates(title: str, note: str, bars: Sequence[Rate], legend: Sequence[tuple[str, str]] = ()) -> Bars:
    """Return bars from 0 with their intervals; values that are not finite have no bar."""
    values = [value for each in bars if (value := finite(each.rate.value)) is not None and value > 0]
    most = max(values, default=1.0)
    # An interval far beyond all values would leave no room for these: clip it at the edge.
    top = min(_FAR * most, max([most, *(high for each in bars if (high := finite(each.rate.high)) is not None)]))
    used = {each.colour for each in bars}
    return Bars(title, [_row(each, top) for each in bars], [each for each in legend if each[1] in used], note)


def _row(each: Rate, top: float) -> BarRow:
    value = finite(each.rate.value) or 0.0
    low, high = finite(each.rate.low), finite(each.rate.high)
    bounds = None if low is None or high is None else (max(0.0, low / top), min(1.0, high / top))
    return BarRow(each.name, [Part(each.name, max(0.0, value / top), each.text, each.colour)], each.text, bounds)


def verdict_of(whose: str, recorded: Mapping[str, str]) -> Verdict | None:
    """Return the bottleneck of `whose` runs, where a next change should start; None if unknown."""
    if not recorded.get("bottleneck"):
        return None
    texts = {key: clean(value, 500) for key, value in recorded.items()}
    ceiling = f"Ceiling: {texts['ceiling'].rstrip('.')}." if texts.get("ceiling") else ""
    return Verdict(f"{whose}: {texts['bottleneck']}", texts.get("evidence", ""), ceiling, "", texts.get("try", ""))


def bounds_of(interval: Interval | None) -> str:
    """Return `1.19 to 1.28 with 95 % confidence`, or that there was only one measurement."""
    if interval is None or interval.low is None or interval.high is None:
        return "measured once, so its scatter is unknown"
    return f"{interval.low:,.2f} to {interval.high:,.2f} {SURE}"
