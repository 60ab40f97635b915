"""Refuse to import plugins that are named in a file, unless the user consents with `--trust-code`."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from paceline.core.errors import RecipeError
from paceline.recipe.load import LoadedRecipe
from paceline.recipe.plugins import plugins_of
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.base import is_plugin_name

TRUST_CODE: Final = "--trust-code"
EVALUATED: Final = ("model", "data.source", "train.metrics", "train.monitor")
"""Fields whose plugins an evaluation imports."""
_SECTIONS: Final = ("model", "data.source", "data.sampler", "optim", "train.loss")
_LISTS: Final = ("data.augment", "log.sinks", "train.callbacks", "train.metrics")


def require_consent(loaded: LoadedRecipe, *, trust_code: bool, paths: tuple[str, ...] = ("",)) -> None:
    """Raise `RecipeError` for a plugin below the dotted `paths` that a file of `loaded` names, unless `trust_code`."""
    if trust_code:
        return
    # Plugins named on the command line or by a script need no consent: the user typed them.
    for plugin in plugins_of(loaded.recipe):
        if plugin.path.startswith(paths) and loaded.stack.file_of(plugin.field):
            raise _refusal(loaded.stack.origin(plugin.field), plugin.field, plugin.name)


def require_consent_to_settings(settings: Mapping[str, Any], place: str, *, trust_code: bool) -> None:
    """Raise `RecipeError` for a plugin in `settings`, part of a recipe in the file at `place`, unless `trust_code`."""
    for field, name in _find_plugin_names(settings):
        if not trust_code:
            raise _refusal(place, field, name)


def settings_have_plugins(settings: Mapping[str, Any]) -> bool:
    """Return whether `settings`, part of a recipe, name a plugin."""
    return next(_find_plugin_names(settings), None) is not None


def has_plugins(recipe: Recipe) -> bool:
    """Return whether `recipe` names a plugin, so that a file with it needs `--trust-code`."""
    return next(plugins_of(recipe), None) is not None


def consent_arguments(recipe: Recipe) -> tuple[str, ...]:
    """Return the arguments that a command needs to read `recipe` from a file written by paceline."""
    return (TRUST_CODE,) if has_plugins(recipe) else ()


def _refusal(location: str, field: str, name: str) -> RecipeError:
    return RecipeError(
        f"{location}: {field}: {name} is custom code, which would run with your full permissions "
        f"(add {TRUST_CODE}, in Python trust_code=True, if you trust its author)"
    )


def _find_plugin_names(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the field and the name of each plugin in nested `settings`, which may be invalid."""
    for path in _SECTIONS:
        section = _get_at(settings, path)
        name = section.get("name") if isinstance(section, Mapping) else section
        if isinstance(name, str) and is_plugin_name(name):
            yield f"{path}.name", name
    monitor = _get_at(settings, "train.monitor")
    if isinstance(monitor, str) and is_plugin_name(monitor):
        yield "train.monitor", monitor
    for path in _LISTS:
        items = _get_at(settings, path)
        for position, item in enumerate(items if isinstance(items, list | tuple) else ()):
            name = item.get("name") if isinstance(item, Mapping) else item
            if isinstance(name, str) and is_plugin_name(name):
                yield f"{path}[{position}]{'' if path == 'train.metrics' else '.name'}", name


def _get_at(settings: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None."""
    value: Any = settings
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
