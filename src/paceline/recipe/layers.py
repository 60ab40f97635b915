"""Lay mappings over one another and remember where each value came from."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.recipe.schema import Recipe
from paceline.recipe.schema.model import BUILT_IN_MODELS_ONLY
from paceline.recipe.schema.own import is_own_model
from paceline.recipe.schema.train import REPLACED_WHOLE

ALTERNATIVES: Final = (("train", "epochs", "steps"), ("data", "batch_size", "rank_batch_size"))
"""Sections with two fields that say the same thing in different units, of which the later layer's counts."""


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

    def location(self, path: str) -> str:
        """Return `file:line` of a dotted path, or just the origin."""
        return f"{self.origin}:{self.lines[path]}" if path in self.lines else self.origin


@dataclass(frozen=True)
class LayerStack:
    """Layers merged: the `values`, for each dotted leaf path the place it came from, and which places are `files`."""

    values: dict[str, Any]
    origins: dict[str, str]
    files: frozenset[str] = frozenset()

    def origin(self, path: str) -> str:
        """Return where `path`, or the section around it, was set; `default` when nowhere."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return "default"

    def file_of(self, path: str) -> str:
        """Return the file in which `path`, or the section around it, was set; nothing where it was no file."""
        origin = self.origin(path)
        return next((file for file in self.files if origin == file or origin.startswith(f"{file}:")), "")


def merge_layers(layers: Iterable[Layer]) -> LayerStack:
    """Merge layers, the later over the earlier.

    Choosing another variant by `name` drops the fields of the one before. Another network drops the arguments of the
    one before, and one of a user's own the settings of ours. A mapping that is one value (`REPLACED_WHOLE`)
    replaces the one before. Of two settings that exclude each other (`ALTERNATIVES`, such as `train.epochs` and
    `train.steps`) the later wins.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    files: set[str] = set()
    variants = _default_variants()
    for layer in layers:
        files.update({layer.origin} if layer.lines else ())
        _drop_replaced(values, layer.values, variants)
        _overlay(values, layer.values)
        _record(layer, layer.values, "", origins)
    _name_variants(values, variants)
    there = {path: origin for path, origin in origins.items() if _has(values, path)}
    return LayerStack(values, there, frozenset(files))


def _drop_replaced(values: dict[str, Any], over: dict[str, Any], variants: dict[str, str]) -> None:
    for path, default in variants.items():
        *parents, leaf = path.split(".")
        base, change = _section(values, parents), _section(over, parents)
        if not isinstance(change.get(leaf), dict):
            continue
        old, new = base.get(leaf), change[leaf]
        if isinstance(old, dict) and "name" in new and new["name"] != old.get("name", default):
            del base[leaf]
    _drop_other_variants(_section(values, ["model"]), _section(over, ["model"]))
    for section, one, other in ALTERNATIVES:
        base, change = _section(values, [section]), _section(over, [section])
        for given, replaced in ((one, other), (other, one)):
            if change.get(given, "auto") != "auto" and replaced not in change:
                base.pop(replaced, None)


def _drop_other_variants(model: dict[str, Any], change: dict[str, Any]) -> None:
    """Drop the arguments of a network that gives way to another, and what a user's own has no use for."""
    name = change.get("name")
    if not isinstance(name, str) or name == model.get("name"):
        return
    model.pop("args", None)
    if is_own_model(name):
        for field in BUILT_IN_MODELS_ONLY:
            if model.get(field) != "sync_batch":
                model.pop(field, None)


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


def _overlay(values: dict[str, Any], over: dict[str, Any], prefix: str = "") -> None:
    for key, value in over.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and path not in REPLACED_WHOLE:
            if not isinstance(values.get(key), dict):
                values[key] = {}
            _overlay(values[key], value, f"{path}.")
        else:
            values[key] = value


def _record(layer: Layer, values: dict[str, Any], prefix: str, origins: dict[str, str]) -> None:
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and path not in REPLACED_WHOLE:
            _record(layer, value, f"{path}.", origins)
        else:
            origins[path] = layer.location(path)


def _has(values: Any, path: str) -> bool:
    for key in path.split("."):
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True
