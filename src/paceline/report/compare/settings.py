"""The settings of runs: which of them differ, and what runs are called after these."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from io import StringIO
from typing import Any, Final

from paceline.report.words import clean

_LONGEST: Final = 120
_MAX_DEPTH: Final = 20
_NOTHING: Final = ("0ep", "0st", "0img", "0%", "0s", "0min", "0h", "0", "0.0", "off", "")
_WARMUP: Final = "schedule.warmup"
_TELLING: Final = ("optim.lr", "train.epochs", "train.steps")
"""What says more of a run than others do, which come before it in a recipe."""
_AUTO: Final = "auto"
_QUIET: Final = ("log.", "checkpoint.", "measure.", "data.worker_timeout", "parallel.timeout", "torch", "paceline")
"""Settings and versions that are in a name only if nothing else tells runs apart."""
_FIRST: Final = ("model.name", "data.batch_size", _WARMUP, "ranks", "train.precision", "optim.name")
"""The settings that a name begins with, in this order."""


def read_settings(text: str) -> tuple[dict[str, str], str]:
    """Return the settings of a resolved recipe as text by dotted path, and what is wrong with it ("" when nothing is).

    Lists are JSON. YAML that no recipe has is refused: an alias could grow without end, and deep nesting takes minutes.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if not text.strip():
        return {}, "recipe.yaml: is missing or empty"
    try:
        yaml = YAML(typ="safe", pure=True)
        if not _is_plain(yaml.parse(StringIO(text))):
            return {}, "recipe.yaml: has anchors, aliases or many levels, which no resolved recipe has"
        values = yaml.load(text)
    except (YAMLError, ValueError, RecursionError, AssertionError, TypeError) as error:
        return {}, clean(f"recipe.yaml: is no YAML: {' '.join(str(error).split())}", 200)
    if not isinstance(values, dict):
        return {}, "recipe.yaml: is no mapping"
    return dict(_flat(values, "")), ""


def differing(groups: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the dotted paths that are not the same in all groups, in the order in which recipes have them."""
    paths = dict.fromkeys(path for settings in groups for path in settings)
    return [path for path in paths if len({settings.get(path) for settings in groups}) > 1]


def called(groups: Sequence[Mapping[str, str]], folders: Sequence[str]) -> list[str]:
    """Return a name for each group, such as `batch 2048 with warm-up`: all settings that differ, important ones first.

    Settings that change neither what is trained nor how fast are added only if nothing else tells the groups apart. A
    group that no setting tells apart, such as a single one, is named after its folder.
    """
    paths = differing(groups)
    spoken = [path for path in _FIRST if path in paths]
    others = sorted((path for path in paths if path not in spoken), key=lambda path: _is_late(path, groups))
    telling = [*spoken, *(path for path in others if not path.startswith(_QUIET))]
    quiet = [path for path in others if path.startswith(_QUIET)]
    for num_quiet in range(len(quiet) + 1):
        names = _named(groups, [*telling, *quiet[:num_quiet]])
        if _tell_apart(names):
            return names
    pairs = zip(names, folders, strict=True)
    return [f"{clean(name, max(16, 77 - len(folder)))} ({folder})" if name else folder for name, folder in pairs]


def _is_late(path: str, groups: Sequence[Mapping[str, str]]) -> tuple[bool, bool, bool]:
    """Return the order of paths: those that tell most, those that all groups have, the others, and quiet ones last."""
    return path.startswith(_QUIET), path not in _TELLING, any(path not in settings for settings in groups)


def _told(path: str, settings: Mapping[str, str], groups: Sequence[Mapping[str, str]]) -> str:
    """Return the word for a setting; where it is `auto` only as another is given in its place, the word for that.

    Such as `train.steps=14` for `train.epochs`: of two fields of one section, each is `auto` where the other is not.
    """
    if settings.get(path) != _AUTO:
        return _word(path, settings.get(path, ""))
    section = path.rpartition(".")[0]
    for place, value in settings.items():
        if place.rpartition(".")[0] == section and value != _AUTO and _replaces(place, path, groups):
            return _word(place, value)
    return _word(path, _AUTO)


def _replaces(place: str, path: str, groups: Sequence[Mapping[str, str]]) -> bool:
    """Whether all groups have either of two settings, and leave the other one to it."""
    return all((settings.get(place) == _AUTO) != (settings.get(path) == _AUTO) for settings in groups)


def _named(groups: Sequence[Mapping[str, str]], paths: Sequence[str]) -> list[str]:
    """Return the words for `paths` of each group. That there is no warm-up is said where all else is another's."""
    rest = [path for path in paths if path != _WARMUP]
    bare = [tuple(settings.get(path) for path in rest) for settings in groups]
    lengths = {settings.get(_WARMUP, "") for settings in groups} - set(_NOTHING)
    names = []
    for settings, same in zip(groups, bare, strict=True):
        says_none = bare.count(same) > 1
        words = [
            _warmup(settings.get(_WARMUP, ""), is_only=len(lengths) == 1, says_none=says_none)
            if path == _WARMUP
            else _told(path, settings, groups)
            for path in paths
        ]
        # A field that a group lacks, such as one of a section that is off, is named only if it has none of the others.
        present = [word for word in words if not word.startswith("no ")] or words
        names.append(clean(", ".join(filter(None, dict.fromkeys(present))).replace(", with", " with"), 100))
    return names


def _warmup(length: str, *, is_only: bool, says_none: bool) -> str:
    """Return how warm-up is told; `is_only` says that there is one length of it but for none."""
    if length in _NOTHING:
        return "without warm-up" if says_none else ""
    return "with warm-up" if is_only else f"with {length} of warm-up"


def _word(path: str, value: str) -> str:
    """Return a setting in a word or two."""
    match path:
        case "data.batch_size":
            return f"batch {value}"
        case "ranks":
            return f"{value} rank" if value == "1" else f"{value} ranks"
        case "model.name" | "train.precision" | "optim.name" | "device":
            return value
        case "optim.lr" | "torch" | "paceline":
            return f"{path.removeprefix('optim.')} {value}"
        case _:
            return f"{path}={value}" if value else f"no {path}"


def _tell_apart(names: Sequence[str]) -> bool:
    return all(names) and len(set(names)) == len(names)


def _is_plain(events: Iterable[object]) -> bool:
    from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent

    depth = 0
    for event in events:
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > _MAX_DEPTH or getattr(event, "anchor", None) is not None:
            return False
    return True


def _flat(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        path = _path(f"{prefix}{key}")
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{path}.")
        else:
            yield path, _text(value)


def _path(path: str) -> str:
    """Return a dotted path as it is shown: a long one is cut, with a digest that keeps it unlike others.

    Paths are cut as they are read, since all fields of a section begin with its name.
    """
    if len(path) <= _LONGEST:
        return clean(path)
    return f"{clean(path, _LONGEST)} {sha256(path.encode(errors='surrogatepass')).hexdigest()[:8]}"


def _text(value: Any) -> str:
    """Return a value as a recipe has it; a long one is cut where it is shown, and not here: it tells runs apart."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def shown(value: str | None) -> str:
    """Return a setting for a person, `-` for one that a recipe has not."""
    return "-" if value is None else clean(value, _LONGEST)
