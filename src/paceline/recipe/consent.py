"""Refuse to import code named in a file, unless the user has allowed it."""

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
    """Raise `RecipeError` for the first plugin named in a file of `loaded`, unless `own_code`; `of` limits the check to
    plugins below these dotted paths."""
    if own_code:
        return
    for plugin in plugins_of(loaded.recipe):
        field = f"{plugin.path}.name"
        if plugin.path.startswith(of) and loaded.stack.file_of(field):
            raise _refusal(loaded.stack.origin(field), field, plugin.name)


def require_consent_to_settings(settings: Mapping[str, Any], place: str, *, own_code: bool) -> None:
    """Raise `RecipeError` for the first plugin in `settings`, part of a recipe in the file at `place`, unless
    `own_code`."""
    for field, name in _named_in(settings):
        if not own_code:
            raise _refusal(place, field, name)


def settings_name_code(settings: Mapping[str, Any]) -> bool:
    """Whether `settings`, part of a recipe, name a plugin."""
    return next(_named_in(settings), None) is not None


def names_code(recipe: Recipe) -> bool:
    """Whether a file with this recipe needs `--own-code` to be read."""
    return next(plugins_of(recipe), None) is not None


def consent_arguments(recipe: Recipe) -> tuple[str, ...]:
    """Return the arguments a command needs to read `recipe` from a file that paceline itself wrote: `--own-code` or
    none."""
    return (OWN_CODE,) if names_code(recipe) else ()


def _refusal(location: str, field: str, name: str) -> RecipeError:
    return RecipeError(
        f"{location}: {field}: {name} is code, which runs with all your rights "
        f"(add {OWN_CODE}, in Python own_code=True, if you trust its author)"
    )


def _named_in(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the field and the name of each plugin in nested `settings`, valid or not."""
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
    """Return the value at a dotted path, or None."""
    value: Any = settings
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
