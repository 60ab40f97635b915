"""What the pages of all experiments share: bars of rates with their intervals, and where the numbers come from."""

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
MANY: Final = 40
"""Rows of a table that are open; the others are folded away."""
_LONGEST_COMMAND: Final = 4000
_FAR: Final = 1.5
_TOLD_ELSEWHERE: Final = ("command",)


@dataclass(frozen=True)
class Told:
    """An experiment as its folder has it, beside its result: where it is, and the recipe it varies ("" for none).

    `problems` says what of the folder could not be read, a line each.
    """

    path: Path
    recipe: str = ""
    problems: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The folder's name, which begins with the experiment's."""
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
        """Return the page; sections that are None are left out."""
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
        """Return what was asked for, on what, the recipe, and the folders of the runs."""
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
        return Section("origin", "Provenance", blocks or [cells.missing("Nothing was written of where this is from.")])


@dataclass(frozen=True)
class Rate:
    """A bar: its name, its length and interval, the text beside it, and the style sheet's class of its colour."""

    name: str
    rate: Interval
    text: str
    colour: str


def shell(words: Sequence[str]) -> Command:
    """Return words as a command to paste."""
    return Command(clean(shlex.join(words), _LONGEST_COMMAND))


def rates(title: str, note: str, found: Sequence[Rate], legend: Sequence[tuple[str, str]] = ()) -> Bars:
    """Return bars from 0, whose intervals are drawn; values that are no measurement have no bar.

    An interval that goes far beyond all values would leave no room for these: it is drawn up to the edge.
    """
    values = [value for each in found if (value := finite(each.rate.value)) is not None and value > 0]
    most = max(values, default=1.0)
    top = min(_FAR * most, max([most, *(high for each in found if (high := finite(each.rate.high)) is not None)]))
    used = {each.colour for each in found}
    return Bars(title, [_row(each, top) for each in found], [each for each in legend if each[1] in used], note)


def _row(each: Rate, top: float) -> BarRow:
    value = finite(each.rate.value) or 0.0
    low, high = finite(each.rate.low), finite(each.rate.high)
    bounds = None if low is None or high is None else (max(0.0, low / top), min(1.0, high / top))
    return BarRow(each.name, [Part(each.name, max(0.0, value / top), each.text, each.colour)], each.text, bounds)


def verdict_of(whose: str, found: Mapping[str, str]) -> Verdict | None:
    """Return what holds `whose` runs back, which is where a next change would begin; None where nobody knows."""
    if not found.get("bottleneck"):
        return None
    told = {key: clean(value, 500) for key, value in found.items()}
    ceiling = f"Ceiling: {told['ceiling'].rstrip('.')}." if told.get("ceiling") else ""
    return Verdict(f"{whose}: {told['bottleneck']}", told.get("evidence", ""), ceiling, "", told.get("try", ""))


def bounds_of(found: Interval | None) -> str:
    """Return `1.19 to 1.28 with 95 % confidence`, or that there was one measurement alone."""
    if found is None or found.low is None or found.high is None:
        return "measured once, so nothing is known of its scatter"
    return f"{found.low:,.2f} to {found.high:,.2f} {SURE}"
