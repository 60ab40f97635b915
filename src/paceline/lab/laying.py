"""Merge patches so that later settings win, including other variants of a section. Pure."""

from collections.abc import Iterable
from typing import Any, Final

from paceline.lab.trial import apply_patch
from paceline.recipe.layers import ALTERNATIVES
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.source import Lmdb, Pack

SOURCE_SECTION: Final = "data.source"
_VARIANT_SECTIONS: Final = (SOURCE_SECTION, "optim", "schedule")
"""Sections whose fields are dropped when another `name` is chosen."""


def merge_patches(recipe: Recipe, below: Patch, added: Patch) -> Patch:
    """Return `added` on top of `below`; fields of a variant that `added` replaces are dropped.

    Raise `RecipeError` if `below` does not fit `recipe`.
    """
    added = flatten_patch(added)
    for path, name in added.assignments:
        section, _, leaf = path.rpartition(".")
        if (
            leaf == "name"
            and section in _VARIANT_SECTIONS
            and name != _get_variant_name(apply_patch(recipe, below), section)
        ):
            # A patch is one layer of a recipe, in which a field of the previous variant would be an error.
            below = drop_section(below, section)
    overridden = expand_equivalent_paths(path for path, _ in added.assignments)
    remaining = (each for each in below.assignments if each[0] not in overridden)
    return Patch((*remaining, *added.assignments))


def expand_equivalent_paths(paths: Iterable[str]) -> set[str]:
    """Return `paths` and the fields that set the same value in another unit (`ALTERNATIVES`)."""
    expanded = set(paths)
    for section, *names in ALTERNATIVES:
        equivalents = {f"{section}.{name}" for name in names}
        expanded |= equivalents if expanded & equivalents else set()
    return expanded


def flatten_patch(patch: Patch) -> Patch:
    """Return the patch with one entry per field: `optim={name: adam}` becomes `optim.name=adam`."""
    assignments: list[tuple[str, Any]] = []
    for path, value in patch.assignments:
        if isinstance(value, dict) and value:
            assignments += flatten_patch(
                Patch(tuple((f"{path}.{name}", each) for name, each in value.items()))
            ).assignments
        else:
            assignments.append((path, value))
    return Patch(tuple(assignments))


def drop_section(patch: Patch, section: str) -> Patch:
    """Return `patch` without the settings of a section."""
    return Patch(
        tuple(each for each in patch.assignments if each[0] != section and not each[0].startswith(f"{section}."))
    )


def build_source_patch(source: Pack | Lmdb) -> Patch:
    """Return the patch that selects `source`."""
    return Patch(((f"{SOURCE_SECTION}.name", source.name), (f"{SOURCE_SECTION}.root", source.root)))


def _get_variant_name(recipe: Recipe, section: str) -> str:
    value: Any = recipe
    for name in section.split("."):
        value = getattr(value, name)
    return str(value.name)
