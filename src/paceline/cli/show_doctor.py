"""Print the findings of `paceline doctor`, with advice below each."""

from collections.abc import Iterable, Sequence
from typing import Final

from paceline.core.units import count
from paceline.lab.doctor.finding import DoctorFinding

_MARKS: Final = {"ok": "ok", "look": "LOOK", "wrong": "WRONG"}


def finding_rows(findings: Iterable[DoctorFinding]) -> list[tuple[str, ...]]:
    """Return one row per finding: check, state, and result with advice below."""
    return [(each.name, _MARKS[each.state], "\n".join(_finding_lines(each))) for each in findings]


def summarize_findings(findings: Sequence[DoctorFinding]) -> str:
    """Return one sentence about all findings."""
    wrong, num_look = (sum(each.state == state for each in findings) for state in ("wrong", "look"))
    if wrong:
        return f"a run would fail: {count(wrong, 'thing')} wrong" + (f", {num_look} worth a look" if num_look else "")
    return f"a run would work; {count(num_look, 'thing')} worth a look" if num_look else "all is well"


def _finding_lines(finding: DoctorFinding) -> list[str]:
    text = f"{finding.where}: {finding.found}" if finding.where else finding.found
    return [text, *([f"-> {finding.advice}"] if finding.advice else [])]
