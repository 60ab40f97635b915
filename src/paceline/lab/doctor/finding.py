"""Findings: the result type of every check of `paceline doctor`."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Final, Literal

from paceline.core.errors import PacelineError

FindingState = Literal["ok", "look", "wrong"]
_STATES_BY_SEVERITY: Final[tuple[FindingState, ...]] = ("ok", "look", "wrong")


@dataclass(frozen=True)
class DoctorFinding:
    """Result of a check: name, state, what was found, and advice ("" if ok).

    `ok`: as it should be. `warning`: a run works, but slower or less safely than it could. `problem`: a run would fail.
    `where` names the rank and host, "" for this machine.
    """

    name: str
    state: FindingState
    found: str
    advice: str = ""
    where: str = ""

    def __post_init__(self) -> None:
        """Assert that there is advice exactly if the state is not ok."""
        assert (self.state == "ok") == (not self.advice), (self.name, self.state, self.advice)

    @classmethod
    def ok(cls, name: str, found: str) -> "DoctorFinding":
        """Return a finding without problem."""
        return cls(name, "ok", found)

    @classmethod
    def warning(cls, name: str, found: str, advice: str) -> "DoctorFinding":
        """Return a warning: a run works, but less well than it could."""
        return cls(name, "look", found, advice)

    @classmethod
    def problem(cls, name: str, found: str, advice: str) -> "DoctorFinding":
        """Return a problem: a run would fail."""
        return cls(name, "wrong", found, advice)

    @classmethod
    def from_error(cls, name: str, error: PacelineError) -> "DoctorFinding":
        """Return the problem that a run would fail with `error`; the last parentheses of its message are the advice."""
        found, _, advice = str(error).rpartition(" (")
        return cls(name, "wrong", found, advice.removesuffix(")")) if found else cls(name, "wrong", advice, "fix it")

    def with_location(self, where: str) -> "DoctorFinding":
        """Return the finding for a location such as `rank 3 (node07)`."""
        return replace(self, where=where)

    def to_dict(self) -> dict[str, str]:
        """Return plain values for JSON."""
        return asdict(self)


def find_worst_state(findings: Iterable[DoctorFinding]) -> FindingState:
    """Return the worst state of `findings`, `ok` if there are none."""
    return max((finding.state for finding in findings), key=_STATES_BY_SEVERITY.index, default="ok")


def has_problem(findings: Iterable[DoctorFinding]) -> bool:
    """Return whether a run would fail because of one of `findings`."""
    return find_worst_state(findings) == "wrong"
