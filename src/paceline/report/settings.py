"""Read the settings and plugin code of runs, find where they differ, and name groups of runs by them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from io import StringIO
from typing import Any, Final

from paceline.report.text import clean_text

_MAX_SETTING_CHARS: Final = 120
_MAX_DEPTH: Final = 20
_ZERO_WARMUPS: Final = ("0ep", "0st", "0img", "0%", "0s", "0min", "0h", "0", "0.0", "off", "")
_WARMUP_SETTING: Final = "schedule.warmup"
# Settings that come before others in a name, as they say most about a run.
_PRIORITY_SETTINGS: Final = ("optim.lr", "train.epochs", "train.steps")
_AUTO_SUFFIX: Final = "=auto"
# Settings and versions that appear in a name only if nothing else distinguishes the runs.
_MINOR_SETTINGS: Final = (
    "log.",
    "checkpoint.",
    "measure.",
    "data.worker_timeout",
    "parallel.timeout",
    "torch",
    "paceline",
)
# Settings that a name starts with, in this order.
_LEADING_SETTINGS: Final = ("model.name", "data.batch_size", _WARMUP_SETTING, "ranks", "train.precision", "optim.name")
# Enough of a SHA-256 to distinguish two files.
_DIGEST_CHARS: Final = 8


def read_settings(text: str) -> tuple[dict[str, str], str]:
    """Return a resolved recipe as text by dotted path (lists as JSON), and an error message or ""."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if not text.strip():
        return {}, "recipe.yaml: is missing or empty"
    try:
        yaml = YAML(typ="safe", pure=True)
        # Aliases could expand without limit, and deep nesting takes minutes to parse; no resolved recipe has either.
        if not _is_plain_yaml(yaml.parse(StringIO(text))):
            return {}, "recipe.yaml: has anchors, aliases or deep nesting, unlike any resolved recipe"
        values = yaml.load(text)
    except (YAMLError, ValueError, RecursionError, AssertionError, TypeError) as error:
        return {}, clean_text(f"recipe.yaml: is not valid YAML: {' '.join(str(error).split())}", 200)
    if not isinstance(values, dict):
        return {}, "recipe.yaml: is not a mapping"
    return dict(_flatten(values, "")), ""


def find_differing_settings(groups: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the dotted paths whose values differ between groups, in recipe order."""
    paths = dict.fromkeys(path for settings in groups for path in settings)
    return [path for path in paths if len({settings.get(path) for settings in groups}) > 1]


def name_groups(groups: Sequence[Mapping[str, str]], folders: Sequence[str]) -> list[str]:
    """Return a name for each group from all differing settings: `batch 2048 with warm-up`."""
    paths = find_differing_settings(groups)
    leading = [path for path in _LEADING_SETTINGS if path in paths]
    others = sorted((path for path in paths if path not in leading), key=lambda path: _sort_key(path, groups))
    minor = [path for path in others if path.startswith(_MINOR_SETTINGS) or _is_of_another_kind(path, paths, groups)]
    informative = [*leading, *(path for path in others if path not in minor)]
    # Settings that say little about a run are added one by one, until the names are distinct.
    for num_minor in range(len(minor) + 1):
        names = _build_names(groups, [*informative, *minor[:num_minor]])
        if _are_distinct(names):
            return names
    # No setting distinguishes the groups, but their folders do.
    pairs = zip(names, folders, strict=True)
    return [f"{clean_text(name, max(16, 77 - len(folder)))} ({folder})" if name else folder for name, folder in pairs]


def _is_of_another_kind(path: str, paths: Sequence[str], groups: Sequence[Mapping[str, str]]) -> bool:
    """Whether a setting follows from another kind of its section: only some have it, or the dataset is elsewhere."""
    if f"{path.rpartition('.')[0]}.name" not in paths:
        return False
    return path == "data.source.root" or any(path not in settings for settings in groups)


def _sort_key(path: str, groups: Sequence[Mapping[str, str]]) -> tuple[bool, bool, bool]:
    # The most informative first, then settings of all groups, minor ones last.
    return (
        path.startswith(_MINOR_SETTINGS),
        path not in _PRIORITY_SETTINGS,
        any(path not in settings for settings in groups),
    )


def _build_names(groups: Sequence[Mapping[str, str]], paths: Sequence[str]) -> list[str]:
    rest = [path for path in paths if path != _WARMUP_SETTING]
    bare = [tuple(settings.get(path) for path in rest) for settings in groups]
    lengths = {settings.get(_WARMUP_SETTING, "") for settings in groups} - set(_ZERO_WARMUPS)
    names = []
    for settings, same in zip(groups, bare, strict=True):
        # Name the absence of warm-up only if another group differs in nothing else.
        names_absence = bare.count(same) > 1
        labels = [
            _warmup_text(settings.get(_WARMUP_SETTING, ""), is_only=len(lengths) == 1, names_absence=names_absence)
            if path == _WARMUP_SETTING
            else _setting_label(path, settings.get(path, ""))
            for path in paths
        ]
        # Name a field that is absent or auto, such as the epochs of a run of so many steps, only if nothing else names
        # the group.
        present = [each for each in labels if not each.startswith("no ") and not each.endswith(_AUTO_SUFFIX)] or labels
        names.append(clean_text(", ".join(filter(None, dict.fromkeys(present))).replace(", with", " with"), 100))
    return names


def _warmup_text(length: str, *, is_only: bool, names_absence: bool) -> str:
    """Return the label of a warm-up; `is_only`: all groups with a warm-up have this length."""
    if length in _ZERO_WARMUPS:
        return "without warm-up" if names_absence else ""
    return "with warm-up" if is_only else f"with {length} of warm-up"


def _setting_label(path: str, value: str) -> str:
    match path:
        case "data.batch_size":
            return f"batch {value}"
        case "ranks":
            return f"{value} rank" if value == "1" else f"{value} ranks"
        case "model.name" | "train.precision" | "optim.name" | "data.source.name" | "device":
            return value
        case "optim.lr" | "torch" | "paceline":
            return f"{path.removeprefix('optim.')} {value}"
        case _:
            return f"{path}={value}" if value else f"no {path}"


def _are_distinct(names: Sequence[str]) -> bool:
    return all(names) and len(set(names)) == len(names)


def _is_plain_yaml(events: Iterable[object]) -> bool:
    from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent

    depth = 0
    for event in events:
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > _MAX_DEPTH or getattr(event, "anchor", None) is not None:
            return False
    return True


def _flatten(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        path = _shorten_path(f"{prefix}{key}")
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{path}.")
        else:
            yield path, _value_text(value)


def _shorten_path(path: str) -> str:
    # A digest keeps a cut path unique. Cut while reading, since the name of a section is a prefix of all its fields.
    if len(path) <= _MAX_SETTING_CHARS:
        return clean_text(path)
    return f"{clean_text(path, _MAX_SETTING_CHARS)} {sha256(path.encode(errors='surrogatepass')).hexdigest()[:8]}"


def _value_text(value: Any) -> str:
    # Uncut: the value distinguishes runs.
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def format_setting(value: str | None) -> str:
    """Return a setting for display, `-` if the recipe lacks it."""
    return "-" if value is None else clean_text(value, _MAX_SETTING_CHARS)


def read_plugin_code(recorded: object) -> dict[str, str]:
    """Return the code of plugins as settings: `code.nets:Mixer` is `1a2b3c4d`, or `1a2b3c4d, nets 1.0` of a package.

    `recorded` is from a result or checkpoint (`plugins_of`); ignore invalid records.
    """
    plugins = recorded.items() if isinstance(recorded, Mapping) else ()
    versions = {
        _shorten_path(f"code.{name}"): [each.get("sha256", "")[:_DIGEST_CHARS], each.get("package", "")]
        for name, each in plugins
        if isinstance(each, Mapping) and all(isinstance(each.get(key, ""), str) for key in ("sha256", "package"))
    }
    return {name: ", ".join(filter(None, version)) for name, version in versions.items() if any(version)}
