"""Merge patches so that later settings win, including other variants of a section. Pure."""

from collections.abc import Iterable
from typing import Any, Final

from paceline.lab.trial import vary
from paceline.recipe.layers import EITHER
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.source import Lmdb, Pack

SOURCE: Final = "data.source"
_VARIANTS: Final = (SOURCE, "optim", "schedule")
"""Sections whose fields are dropped when another `name` is chosen."""


def lay(recipe: Recipe, below: Patch, added: Patch) -> Patch:
    """Return `added` on top of `below`; fields of a variant that `added` replaces are dropped.

    Raise `RecipeError` if `below` does not fit `recipe`.
    """
    added = by_path(added)
    for path, name in added.assignments:
        section, _, leaf = path.rpartition(".")
        if leaf == "name" and section in _VARIANTS and name != _variant(vary(recipe, below), section):
            # A patch is one layer of a recipe, in which a field of the previous variant would be an error.
            below = without(below, section)
    overridden = settled_by(path for path, _ in added.assignments)
    remaining = (each for each in below.assignments if each[0] not in overridden)
    return Patch((*remaining, *added.assignments))


def settled_by(paths: Iterable[str]) -> set[str]:
    """Return `paths` and the fields that set the same value in another unit (`EITHER`)."""
    expanded = set(paths)
    for section, *names in EITHER:
        equivalents = {f"{section}.{name}" for name in names}
        expanded |= equivalents if expanded & equivalents else set()
    return expanded


def by_path(patch: Patch) -> Patch:
    """Return the patch with one entry per field: `optim={name: adam}` becomes `optim.name=adam`."""
    assignments: list[tuple[str, Any]] = []
    for path, value in patch.assignments:
        if isinstance(value, dict) and value:
            assignments += by_path(Patch(tuple((f"{path}.{name}", each) for name, each in value.items()))).assignments
        else:
            assignments.append((path, value))
    return Patch(tuple(assignments))


def without(patch: Patch, section: str) -> Patch:
    """Return `patch` without the settings of a section."""
    return Patch(
        tuple(each for each in patch.assignments if each[0] != section and not each[0].startswith(f"{section}."))
    )


def reading(source: Pack | Lmdb) -> Patch:
    """Return the patch that selects `source`."""
    return Patch(((f"{SOURCE}.name", source.name), (f"{SOURCE}.root", source.root)))


def _variant(recipe: Recipe, section: str) -> str:
    value: Any = recipe
    for name in section.split("."):
        value = getattr(value, name)
    return str(value.name)
