"""Show what `paceline doctor` found, in a terminal: what is wrong first to be seen, and advice below what it is for."""

from collections.abc import Iterable, Sequence
from typing import Final

from paceline.core.units import count
from paceline.lab.doctor.finding import Finding

_MARKS: Final = {"ok": "ok", "look": "LOOK", "wrong": "WRONG"}


def rows_of(findings: Iterable[Finding]) -> list[tuple[str, ...]]:
    """Return a row a finding: what was looked at, how it stands, and what was found, with the advice below it."""
    return [(each.name, _MARKS[each.state], "\n".join(_lines(each))) for each in findings]


def verdict(findings: Sequence[Finding]) -> str:
    """Return one sentence on all findings."""
    wrong, look = (sum(each.state == state for each in findings) for state in ("wrong", "look"))
    if wrong:
        return f"a run would fail: {count(wrong, 'thing')} wrong" + (f", {look} worth a look" if look else "")
    return f"a run would work; {count(look, 'thing')} worth a look" if look else "all is well"


def _lines(finding: Finding) -> list[str]:
    found = f"{finding.where}: {finding.found}" if finding.where else finding.found
    return [found, *([f"-> {finding.advice}"] if finding.advice else [])]
