"""Identify the plugin code of runs, and find where it differs. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from paceline.core.units import join_few
from paceline.report.words import clean_text

# `sha256` of the file and `package` of each plugin by import path, as far as known.
PluginCode = Mapping[str, Mapping[str, str]]
_VERSION_KEYS: Final = ("sha256", "package")
# Enough of a SHA-256 for a reader to tell two files apart.
_DIGEST_CHARS: Final = 8
_MAX_NAME_CHARS: Final = 80


def read_plugin_code(recorded: object) -> PluginCode:
    """Return the plugins recorded in a result or checkpoint (`plugins_of`); ignore invalid records."""
    plugins = recorded.items() if isinstance(recorded, Mapping) else ()
    return {
        str(name): {what: each[what] for what in _VERSION_KEYS if isinstance(each.get(what), str) and each[what]}
        for name, each in plugins
        if isinstance(each, Mapping)
    }


def describe_mixed_code(runs: Sequence[tuple[str, PluginCode]]) -> str:
    """Return the plugins whose code differs between the runs of a group, given by name, or "".

    A run that has not recorded a plugin counts as having the same code.
    """
    return _join_names(_mixed_versions(plugin, runs) for plugin in _plugin_names(code for _, code in runs))


def describe_other_code(runs: Sequence[PluginCode], reference: Sequence[PluginCode]) -> str:
    """Return the plugins whose code no run shares with those of `reference`, or ""."""
    return _join_names(_other_version(plugin, runs, reference) for plugin in _plugin_names([*runs, *reference]))


def _mixed_versions(plugin: str, runs: Sequence[tuple[str, PluginCode]]) -> str:
    for aspect in _VERSION_KEYS:
        names: dict[str, list[str]] = {}
        for name, code in runs:
            for value in _known_values(plugin, aspect, [code]):
                names.setdefault(value, []).append(name)
        if len(names) > 1:
            each = [f"{_format_version(aspect, value)} in {join_few(run_names)}" for value, run_names in names.items()]
            return f"{clean_text(plugin, _MAX_NAME_CHARS)} ({join_few(each, '; ')})"
    return ""


def _other_version(plugin: str, runs: Sequence[PluginCode], reference: Sequence[PluginCode]) -> str:
    for aspect in _VERSION_KEYS:
        ours, theirs = _known_values(plugin, aspect, runs), _known_values(plugin, aspect, reference)
        if ours and theirs and not set(ours) & set(theirs):
            return f"{clean_text(plugin, _MAX_NAME_CHARS)} ({_format_version(aspect, ours[0])} against {_format_version(aspect, theirs[0])})"
    return ""


def _plugin_names(codes: Iterable[PluginCode]) -> list[str]:
    return list(dict.fromkeys(plugin for code in codes for plugin in code))


def _known_values(plugin: str, aspect: str, codes: Sequence[PluginCode]) -> list[str]:
    return list(dict.fromkeys(code[plugin][aspect] for code in codes if aspect in code.get(plugin, ())))


def _format_version(aspect: str, value: str) -> str:
    return clean_text(f"sha256 {value[:_DIGEST_CHARS]}" if aspect == "sha256" else value, _MAX_NAME_CHARS)


def _join_names(names: Iterator[str]) -> str:
    return join_few([name for name in names if name])
