"""Findings: the result type of every check of `paceline doctor`."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Final, Literal

from paceline.core.errors import PacelineError

State = Literal["ok", "look", "wrong"]
_RANKED: Final[tuple[State, ...]] = ("ok", "look", "wrong")


@dataclass(frozen=True)
class Finding:
    """Result of a check: name, state, what was found, and advice ("" if ok).

    `ok`: as it should be. `look`: a run works, but slower or less safely than it could. `wrong`: a run would fail.
    `where` names the rank and host, "" for this machine.
    """

    name: str
    state: State
    found: str
    advice: str = ""
    where: str = ""

    def __post_init__(self) -> None:
        """Assert that there is advice exactly if the state is not ok."""
        assert (self.state == "ok") == (not self.advice), (self.name, self.state, self.advice)

    @classmethod
    def ok(cls, name: str, found: str) -> "Finding":
        """Return a finding without problem."""
        return cls(name, "ok", found)

    @classmethod
    def look(cls, name: str, found: str, advice: str) -> "Finding":
        """Return a warning: a run works, but less well than it could."""
        return cls(name, "look", found, advice)

    @classmethod
    def wrong(cls, name: str, found: str, advice: str) -> "Finding":
        """Return a problem: a run would fail."""
        return cls(name, "wrong", found, advice)

    @classmethod
    def refused(cls, name: str, error: PacelineError) -> "Finding":
        """Return the problem that a run would fail with `error`; the last parentheses of its message are the advice."""
        found, _, advice = str(error).rpartition(" (")
        return cls(name, "wrong", found, advice.removesuffix(")")) if found else cls(name, "wrong", advice, "fix it")

    def at(self, where: str) -> "Finding":
        """Return the finding for a location such as `rank 3 (node07)`."""
        return replace(self, where=where)

    def to_dict(self) -> dict[str, str]:
        """Return plain values for JSON."""
        return asdict(self)


def worst(findings: Iterable[Finding]) -> State:
    """Return the worst state of `findings`, `ok` if there are none."""
    return max((finding.state for finding in findings), key=_RANKED.index, default="ok")


def is_any_wrong(findings: Iterable[Finding]) -> bool:
    """Return whether a run would fail because of one of `findings`."""
    return worst(findings) == "wrong"
