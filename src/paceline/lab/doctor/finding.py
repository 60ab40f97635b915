"""Say what a look at a machine found: the one word in which every check of `paceline doctor` speaks."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Final, Literal

from paceline.core.errors import PacelineError

State = Literal["ok", "look", "wrong"]
_RANKED: Final[tuple[State, ...]] = ("ok", "look", "wrong")


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it stands, what was found, and what to do about it ("" where all is well).

    `ok` is as it should be, `look` is worth a look (a run works, slower or less safely than it could), `wrong` means
    that a run would fail. `where` names the rank and host that it is of, "" for the machine at hand.
    """

    name: str
    state: State
    found: str
    advice: str = ""
    where: str = ""

    def __post_init__(self) -> None:
        """Hold that there is advice where, and only where, something is to be done."""
        assert (self.state == "ok") == (not self.advice), (self.name, self.state, self.advice)

    @classmethod
    def ok(cls, name: str, found: str) -> "Finding":
        """Return that all is well with `name`."""
        return cls(name, "ok", found)

    @classmethod
    def look(cls, name: str, found: str, advice: str) -> "Finding":
        """Return that `name` is worth a look: a run works, but less well than it could."""
        return cls(name, "look", found, advice)

    @classmethod
    def wrong(cls, name: str, found: str, advice: str) -> "Finding":
        """Return that a run would fail for `name`."""
        return cls(name, "wrong", found, advice)

    @classmethod
    def refused(cls, name: str, error: PacelineError) -> "Finding":
        """Return that a run would fail with `error`, whose last brackets say what to do about it."""
        found, _, advice = str(error).rpartition(" (")
        return cls(name, "wrong", found, advice.removesuffix(")")) if found else cls(name, "wrong", advice, "mend it")

    def at(self, where: str) -> "Finding":
        """Return the same finding of another place, such as `rank 3 (node07)`."""
        return replace(self, where=where)

    def to_dict(self) -> dict[str, str]:
        """Return plain values for JSON."""
        return asdict(self)


def worst(findings: Iterable[Finding]) -> State:
    """Return the worst state of `findings`, `ok` where there are none."""
    return max((finding.state for finding in findings), key=_RANKED.index, default="ok")


def is_any_wrong(findings: Iterable[Finding]) -> bool:
    """Return whether a run would fail for one of `findings`."""
    return worst(findings) == "wrong"
