"""Identify the plugin code of runs, and find where it differs. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from paceline.core.units import few
from paceline.report.words import clean

# `sha256` of the file and `package` of each plugin by import path, as far as known.
Code = Mapping[str, Mapping[str, str]]
_ASPECTS: Final = ("sha256", "package")
# Enough of a SHA-256 for a reader to tell two files apart.
_DIGITS: Final = 8
_LONGEST: Final = 80


def read_code(recorded: object) -> Code:
    """Return the plugins recorded in a result or checkpoint (`own_parts`); ignore invalid records."""
    plugins = recorded.items() if isinstance(recorded, Mapping) else ()
    return {
        str(name): {what: each[what] for what in _ASPECTS if isinstance(each.get(what), str) and each[what]}
        for name, each in plugins
        if isinstance(each, Mapping)
    }


def mixed(runs: Sequence[tuple[str, Code]]) -> str:
    """Return the plugins whose code differs between the runs of a group, given by name, or "".

    A run that has not recorded a plugin counts as having the same code.
    """
    return _listed(_mixed(plugin, runs) for plugin in _parts(code for _, code in runs))


def other(runs: Sequence[Code], reference: Sequence[Code]) -> str:
    """Return the plugins whose code no run shares with those of `reference`, or ""."""
    return _listed(_other(plugin, runs, reference) for plugin in _parts([*runs, *reference]))


def _mixed(plugin: str, runs: Sequence[tuple[str, Code]]) -> str:
    for aspect in _ASPECTS:
        names: dict[str, list[str]] = {}
        for name, code in runs:
            for value in _values(plugin, aspect, [code]):
                names.setdefault(value, []).append(name)
        if len(names) > 1:
            each = [f"{_shown(aspect, value)} in {few(run_names)}" for value, run_names in names.items()]
            return f"{clean(plugin, _LONGEST)} ({few(each, '; ')})"
    return ""


def _other(plugin: str, runs: Sequence[Code], reference: Sequence[Code]) -> str:
    for aspect in _ASPECTS:
        ours, theirs = _values(plugin, aspect, runs), _values(plugin, aspect, reference)
        if ours and theirs and not set(ours) & set(theirs):
            return f"{clean(plugin, _LONGEST)} ({_shown(aspect, ours[0])} against {_shown(aspect, theirs[0])})"
    return ""


def _parts(codes: Iterable[Code]) -> list[str]:
    return list(dict.fromkeys(plugin for code in codes for plugin in code))


def _values(plugin: str, aspect: str, codes: Sequence[Code]) -> list[str]:
    return list(dict.fromkeys(code[plugin][aspect] for code in codes if aspect in code.get(plugin, ())))


def _shown(aspect: str, value: str) -> str:
    return clean(f"sha256 {value[:_DIGITS]}" if aspect == "sha256" else value, _LONGEST)


def _listed(names: Iterator[str]) -> str:
    return few([name for name in names if name])
