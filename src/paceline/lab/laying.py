"""Lay one patch over another so that what is said last holds, other variants of a section included. Pure."""

from collections.abc import Iterable
from typing import Any, Final

from paceline.lab.trial import vary
from paceline.recipe.layers import EITHER
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.source import Lmdb, Pack

SOURCE: Final = "data.source"
_VARIANTS: Final = (SOURCE, "optim", "schedule")
"""Sections whose fields go when another `name` is chosen."""


def lay(recipe: Recipe, below: Patch, added: Patch) -> Patch:
    """Return `added` over `below`. What `below` says of a variant that `added` replaces by another one goes.

    A patch is one layer of a recipe, in which a field of the variant before would be an error. Raise `RecipeError`
    where `below` does not fit `recipe`.
    """
    added = by_path(added)
    for path, name in added.assignments:
        section, _, leaf = path.rpartition(".")
        if leaf == "name" and section in _VARIANTS and name != _variant(vary(recipe, below), section):
            below = without(below, section)
    said = settled_by(path for path, _ in added.assignments)
    kept = (each for each in below.assignments if each[0] not in said)
    return Patch((*kept, *added.assignments))


def settled_by(paths: Iterable[str]) -> set[str]:
    """Return `paths`, and the fields that say the same as one of them in another unit (`EITHER`)."""
    settled = set(paths)
    for section, *names in EITHER:
        either = {f"{section}.{name}" for name in names}
        settled |= either if settled & either else set()
    return settled


def by_path(patch: Patch) -> Patch:
    """Return the same patch with each field of a mapping at its own path: `optim={name: adam}` is `optim.name=adam`."""
    found: list[tuple[str, Any]] = []
    for path, value in patch.assignments:
        if isinstance(value, dict) and value:
            found += by_path(Patch(tuple((f"{path}.{name}", each) for name, each in value.items()))).assignments
        else:
            found.append((path, value))
    return Patch(tuple(found))


def without(patch: Patch, section: str) -> Patch:
    """Return `patch` without what it says of a section."""
    return Patch(
        tuple(each for each in patch.assignments if each[0] != section and not each[0].startswith(f"{section}."))
    )


def reading(source: Pack | Lmdb) -> Patch:
    """Return the patch that reads a source that was made."""
    return Patch(((f"{SOURCE}.name", source.name), (f"{SOURCE}.root", source.root)))


def _variant(recipe: Recipe, section: str) -> str:
    found: Any = recipe
    for name in section.split("."):
        found = getattr(found, name)
    return str(found.name)
