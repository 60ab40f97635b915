"""Refuse to import the user's own code that a file of others names, unless the user has allowed it."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from paceline.core.errors import RecipeError
from paceline.recipe.load import LoadedRecipe
from paceline.recipe.plugins import plugins_of
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.base import is_own_model

OWN_CODE: Final = "--own-code"
_SECTIONS: Final = ("model", "data.source", "optim")
_LISTS: Final = ("data.augment", "log.sinks")


def require_consent(loaded: LoadedRecipe, *, own_code: bool, of: tuple[str, ...] = ("",)) -> None:
    """Raise `RecipeError` for the first code that a file of `loaded` names, unless `own_code` says that it may run.

    With `of`, only parts whose dotted path begins with one of these count: those that are going to be imported.
    """
    if own_code:
        return
    for part in plugins_of(loaded.recipe):
        field = f"{part.path}.name"
        if part.path.startswith(of) and loaded.stack.file_of(field):
            raise _refusal(loaded.stack.origin(field), field, part.name)


def require_consent_to_settings(settings: Mapping[str, Any], place: str, *, own_code: bool) -> None:
    """Raise `RecipeError` for the first code that `settings` name, a part of a recipe written in a file at `place`."""
    for field, name in _named_in(settings):
        if not own_code:
            raise _refusal(place, field, name)


def settings_name_code(settings: Mapping[str, Any]) -> bool:
    """Whether `settings`, a part of a recipe, name code."""
    return next(_named_in(settings), None) is not None


def names_code(recipe: Recipe) -> bool:
    """Whether a file with this recipe is read only with `--own-code`."""
    return next(plugins_of(recipe), None) is not None


def consent_arguments(recipe: Recipe) -> tuple[str, ...]:
    """Return what a command needs that reads `recipe` from a file: `--own-code`, or nothing.

    For recipes that paceline itself has written down, from one that was consented to.
    """
    return (OWN_CODE,) if names_code(recipe) else ()


def _refusal(place: str, field: str, name: str) -> RecipeError:
    return RecipeError(
        f"{place}: {field}: {name} is code, which runs with all your rights (add {OWN_CODE}, in Python own_code=True, "
        "if you trust whoever wrote it)"
    )


def _named_in(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the field and the name of each code that nested `settings` name, whether or not they fit a recipe."""
    for path in _SECTIONS:
        section = _at(settings, path)
        name = section.get("name") if isinstance(section, Mapping) else None
        if isinstance(name, str) and is_own_model(name):
            yield f"{path}.name", name
    for path in _LISTS:
        items = _at(settings, path)
        for position, item in enumerate(items if isinstance(items, list | tuple) else ()):
            name = item.get("name") if isinstance(item, Mapping) else item
            if isinstance(name, str) and is_own_model(name):
                yield f"{path}[{position}].name", name


def _at(settings: Mapping[str, Any], path: str) -> Any:
    """Return what stands at a dotted path, None where nothing does."""
    found: Any = settings
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
