"""Which code of a user's own runs have recorded that they were made with, and where it is not the same. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from paceline.core.units import few
from paceline.report.words import clean

Code = Mapping[str, Mapping[str, str]]
"""The `sha256` of its file, and the `package` it is of, for each part by import path; each as far as it is known."""
_ASPECTS: Final = ("sha256", "package")
_DIGITS: Final = 8
"""Of a sha256, which tell two files apart for a reader."""
_LONGEST: Final = 80


def read_code(recorded: object) -> Code:
    """Return what `own_parts` of a result or a checkpoint say; nothing of what is no such record."""
    parts = recorded.items() if isinstance(recorded, Mapping) else ()
    return {
        str(name): {what: each[what] for what in _ASPECTS if isinstance(each.get(what), str) and each[what]}
        for name, each in parts
        if isinstance(each, Mapping)
    }


def mixed(runs: Sequence[tuple[str, Code]]) -> str:
    """Return the parts that are not the same code in all of a group's runs, given with their names; or nothing.

    A run that has not recorded a part is taken for one with the same code.
    """
    return _listed(_mixed(part, runs) for part in _parts(code for _, code in runs))


def other(runs: Sequence[Code], reference: Sequence[Code]) -> str:
    """Return the parts whose code no run has in common with those of `reference`, or nothing."""
    return _listed(_other(part, runs, reference) for part in _parts([*runs, *reference]))


def _mixed(part: str, runs: Sequence[tuple[str, Code]]) -> str:
    for what in _ASPECTS:
        names: dict[str, list[str]] = {}
        for name, code in runs:
            for value in _values(part, what, [code]):
                names.setdefault(value, []).append(name)
        if len(names) > 1:
            each = [f"{_shown(what, value)} in {few(found)}" for value, found in names.items()]
            return f"{clean(part, _LONGEST)} ({few(each, '; ')})"
    return ""


def _other(part: str, runs: Sequence[Code], reference: Sequence[Code]) -> str:
    for what in _ASPECTS:
        here, there = _values(part, what, runs), _values(part, what, reference)
        if here and there and not set(here) & set(there):
            return f"{clean(part, _LONGEST)} ({_shown(what, here[0])} against {_shown(what, there[0])})"
    return ""


def _parts(codes: Iterable[Code]) -> list[str]:
    return list(dict.fromkeys(part for code in codes for part in code))


def _values(part: str, what: str, codes: Sequence[Code]) -> list[str]:
    """Return what is known of a part, each value once."""
    return list(dict.fromkeys(code[part][what] for code in codes if what in code.get(part, ())))


def _shown(what: str, value: str) -> str:
    return clean(f"sha256 {value[:_DIGITS]}" if what == "sha256" else value, _LONGEST)


def _listed(parts: Iterator[str]) -> str:
    return few([part for part in parts if part])
