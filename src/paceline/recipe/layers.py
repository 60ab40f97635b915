"""Lay mappings over one another and remember where each value came from."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.recipe.schema import Recipe

_SET_EITHER = (("train", "epochs", "steps"),)


def _default_variants() -> dict[str, str]:
    """Return the variant each named section has when nobody chooses one, from the schema."""
    fields = Recipe.model_fields
    return {
        "data.source": fields["data"].default.source.name,
        "optim": fields["optim"].default.name,
        "schedule": fields["schedule"].default.name,
    }


@dataclass(frozen=True)
class Layer:
    """One mapping of a recipe, and where it was written: `origin`, with line numbers when it is a file."""

    values: dict[str, Any]
    origin: str
    lines: dict[str, int] = field(default_factory=dict)

    def where(self, path: str) -> str:
        """Return `file:line` of a dotted path, or just the origin."""
        return f"{self.origin}:{self.lines[path]}" if path in self.lines else self.origin


@dataclass(frozen=True)
class Stack:
    """Layers merged: the `values`, and for each dotted leaf path the place it came from."""

    values: dict[str, Any]
    origins: dict[str, str]

    def origin(self, path: str) -> str:
        """Return where `path`, or the section around it, was set; `default` when nowhere."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return "default"


def merge(layers: Iterable[Layer]) -> Stack:
    """Merge layers, the later over the earlier.

    Choosing another variant by `name` drops the fields of the one before, and of two settings that
    exclude each other (`train.epochs`, `train.steps`) the later wins.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    variants = _default_variants()
    for layer in layers:
        _drop_replaced(values, layer.values, variants)
        _overlay(values, layer.values)
        _record(layer, layer.values, "", origins)
    _name_variants(values, variants)
    return Stack(values, {path: origin for path, origin in origins.items() if _has(values, path)})


def _drop_replaced(values: dict[str, Any], over: dict[str, Any], variants: dict[str, str]) -> None:
    for path, default in variants.items():
        *parents, leaf = path.split(".")
        base, change = _section(values, parents), _section(over, parents)
        if not isinstance(change.get(leaf), dict):
            continue
        old, new = base.get(leaf), change[leaf]
        if isinstance(old, dict) and "name" in new and new["name"] != old.get("name", default):
            del base[leaf]
    for section, one, other in _SET_EITHER:
        base, change = _section(values, [section]), _section(over, [section])
        for given, replaced in ((one, other), (other, one)):
            if change.get(given, "auto") != "auto" and replaced not in change:
                base.pop(replaced, None)


def _name_variants(values: dict[str, Any], variants: dict[str, str]) -> None:
    """Write the default name into sections that set fields without choosing a variant."""
    for path, default in variants.items():
        section = _section(values, path.split("."))
        if section:
            section.setdefault("name", default)


def _section(values: dict[str, Any], path: list[str]) -> dict[str, Any]:
    for key in path:
        child = values.get(key)
        if not isinstance(child, dict):
            return {}
        values = child
    return values


def _overlay(values: dict[str, Any], over: dict[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict):
            if not isinstance(values.get(key), dict):
                values[key] = {}
            _overlay(values[key], value)
        else:
            values[key] = value


def _record(layer: Layer, values: dict[str, Any], prefix: str, origins: dict[str, str]) -> None:
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            _record(layer, value, f"{path}.", origins)
        else:
            origins[path] = layer.where(path)


def _has(values: Any, path: str) -> bool:
    for key in path.split("."):
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True
