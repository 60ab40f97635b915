"""A patch: ordered dotted-path assignments, the only way to vary a recipe."""

import re
from dataclasses import dataclass
from typing import Any, Self

from paceline.core.errors import RecipeError
from paceline.recipe.schema.train import REPLACED_WHOLE
from paceline.recipe.yamlfile import read_yaml_value

_KEY = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)*")


@dataclass(frozen=True)
class Patch:
    """Assignments of plain values to dotted paths, applied together: `optim.name` before `optim.lr`."""

    assignments: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, words: list[str]) -> Self:
        """Read `KEY=VALUE` words; the value is YAML, so `1e-3` is a number and `[flip]` a list."""
        return cls(tuple(_assignment(word) for word in words))

    def values(self) -> dict[str, Any]:
        """Return the assignments as one nested mapping. A later assignment to the same path wins."""
        nested: dict[str, Any] = {}
        for path, value in self.assignments:
            _refuse_key_below_value(path, value)
            *parents, leaf = path.split(".")
            section = nested
            for parent in parents:
                child = section.setdefault(parent, {})
                if not isinstance(child, dict):
                    raise RecipeError(f"{path}: {parent} was just set to {child!r}, so it has no fields (drop one)")
                section = child
            _set_value(section, leaf, value, path)
        return nested


def _refuse_key_below_value(path: str, value: Any) -> None:
    for whole in REPLACED_WHOLE:
        if path.startswith(f"{whole}."):
            one = f"{{{path.removeprefix(f'{whole}.')}: {value}}}"
            raise RecipeError(f"{path}: {whole} is one value, not a section (write {whole}={one})")


def _set_value(section: dict[str, Any], key: str, value: Any, path: str) -> None:
    """Set `key`, the field at `path`; a mapping of fields is merged into the one before, and none is shared."""
    if not isinstance(value, dict):
        section[key] = value
        return
    if path in REPLACED_WHOLE:
        section[key] = dict(value)
        return
    if not isinstance(section.get(key), dict):
        section[key] = {}
    for below, each in value.items():
        _set_value(section[key], below, each, f"{path}.{below}")


def _assignment(word: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    if not equals or not _KEY.fullmatch(key):
        raise RecipeError(f"{word!r}: is not an override (write KEY=VALUE, such as optim.lr=0.4)")
    return key, read_yaml_value(text, key)
