"""From a name and overrides to a recipe: find it, follow `extends`, lay the patch on top, check the types."""

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.core.errors import RecipeError, suggest_similar
from paceline.core.rundir import RECIPE, is_run
from paceline.core.urls import HOW_TO_PASS_CREDENTIALS, find_secret, public_url
from paceline.recipe.explain import explain
from paceline.recipe.fields import choices
from paceline.recipe.layers import Layer, LayerStack, merge_layers
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe
from paceline.recipe.yamlfile import read_yaml_file

DEFAULT = "digits"
_COMMAND_LINE = "command line"
PRESETS = Path(str(resources.files("paceline.recipe") / "presets"))


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, the short name it goes by, and where each of its values came from."""

    recipe: Recipe
    name: str
    stack: LayerStack

    def is_from_command_line(self, path: str) -> bool:
        """Whether `path` was set on the command line, or by the overrides of a script."""
        return self.stack.origin(path) == _COMMAND_LINE


def load(name: str = DEFAULT, patch: Patch | None = None) -> LoadedRecipe:
    """Load preset, file or run directory `name` with `patch` over it. Raise `RecipeError`."""
    path = find_recipe(name)
    layers = [*_load_chain(path, name), Layer((patch or Patch()).values(), _COMMAND_LINE)]
    stack = merge_layers(layers)
    return LoadedRecipe(validate(stack), _short_name(path), stack)


def load_values(values: Mapping[str, Any], patch: Patch | None = None, *, name: str = "script") -> LoadedRecipe:
    """Return the recipe that plain `values` are, with `patch` over them; `extends` starts from a preset or a file.

    It goes by `name`. Raise `RecipeError` as `load` does.
    """
    own = dict(values)
    base = own.pop("extends", None)
    below = [] if base is None else _load_chain(find_recipe(str(base)), str(base))
    stack = merge_layers([*below, Layer(own, name), Layer((patch or Patch()).values(), _COMMAND_LINE)])
    return LoadedRecipe(validate(stack), name, stack)


def load_any(recipe: str | Path | Recipe | Mapping[str, Any], patch: Patch | None = None) -> LoadedRecipe:
    """Return what a script has named or made, with `patch` over it. Raise `RecipeError` as `load` does."""
    match recipe:
        case str() | Path():
            return load(str(recipe), patch)
        case Recipe():
            return load_values(recipe.to_dict(), patch)
        case Mapping():
            return load_values(recipe, patch)
        case _:
            raise RecipeError(f"recipe: {recipe!r} is no recipe (give a name, a path, a mapping or a Recipe)")


def validate(stack: LayerStack) -> Recipe:
    """Return the typed recipe, or raise `RecipeError` for the first field that does not fit."""
    try:
        return Recipe.model_validate(stack.values)
    except ValidationError as error:
        path, message = explain(error, stack.values)
        origin = stack.origin(path)
        prefix = "" if origin in ("default", _COMMAND_LINE) else f"{origin}: "
        raise RecipeError(f"{prefix}{path or 'recipe'}: {message}") from None


def find_recipe(name: str) -> Path:
    """Return the file that `name` means: a preset, a YAML file, or a run directory's recipe."""
    secret = find_secret(name)
    if secret:
        raise RecipeError(f"{public_url(name)}: the URL holds {secret}, and is no recipe ({HOW_TO_PASS_CREDENTIALS})")
    try:
        return _find_file(name)
    except OSError as error:
        raise RecipeError(f"{name!r}: cannot be read: {error.strerror} (see `paceline recipes`)") from None


def _find_file(name: str) -> Path:
    path, preset = _expanded(name), PRESETS / f"{name}.yaml"
    if is_run(path):
        return path / RECIPE
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise RecipeError(f"{path}: no such recipe file (see `paceline recipes` for the presets)")
        return path
    if name in preset_names():
        return preset
    if (path.suffix == ".pack" or (path / "index.pack").is_file()) and name.isprintable():
        raise RecipeError(
            f"{name}: is a pack, no recipe (write: paceline train folder data.source.name=pack "
            f"data.source.root={shlex.quote(name)})"
        )
    if path.is_dir():
        images = f"images: paceline train folder data.source.root={shlex.quote(name)}"
        if os.path.lexists(path / RECIPE):
            raise RecipeError(
                f"{path}: has a {RECIPE}, but not the plan.json of a run: is it a recipe or images? (recipe: name "
                f"{shlex.quote(str(path / RECIPE))}; {images})"
            )
        raise RecipeError(
            f"{path}: is a folder without {RECIPE}, no run (images: paceline train folder data.source.root=...)"
        )
    if "." in name and name in choices():
        raise RecipeError(f"{name!r}: is a field, not a recipe (write {name}=VALUE)")
    hint = suggest_similar(name, preset_names()) or " (see `paceline recipes`)"
    family = [each for each in preset_names() if name and each.startswith(f"{name}-")]
    if len(family) > 1:
        hint = f" (did you mean one of {', '.join(family)}?)"
    raise RecipeError(f"{name!r}: is neither a preset, a recipe file nor a run directory{hint}")


def _expanded(name: str) -> Path:
    """Return `name` as a path, `~` replaced where there is such a user."""
    with suppress(RuntimeError):
        return Path(name).expanduser()
    return Path(name)


def preset_names() -> list[str]:
    """Return the names of the shipped recipes, sorted."""
    return sorted(str(path.relative_to(PRESETS).with_suffix("")) for path in PRESETS.rglob("*.yaml"))


def preset_summary(name: str) -> str:
    """Return the first line of a preset's header."""
    first = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()


def _load_chain(path: Path, name: str) -> list[Layer]:
    """Return the layers from the root of the `extends` chain to `path`."""
    layers: list[Layer] = []
    seen: list[Path] = []
    while True:
        if path.resolve() in seen:
            raise RecipeError(f"{path}: extends itself (mend the chain of `extends`)")
        seen.append(path.resolve())
        document = read_yaml_file(path)
        values: dict[str, Any] = dict(document.values)
        base = values.pop("extends", None)
        layers.insert(0, Layer(values, _origin(path), document.lines))
        if base is None:
            return layers
        if not isinstance(base, str):
            where = layers[0].location("extends")
            raise RecipeError(f"{where}: extends: {base!r} is not a name (write a preset or a file)")
        beside = path.parent / _expanded(base)
        try:
            path = find_recipe(str(beside) if beside.suffix in (".yaml", ".yml") else base)
        except RecipeError as error:
            raise RecipeError(f"{layers[0].location('extends')}: extends: {error}") from None


def _origin(path: Path) -> str:
    """Name a preset by its name and a file by its path."""
    return str(path.relative_to(PRESETS)) if path.is_relative_to(PRESETS) else str(path)


def _short_name(path: Path) -> str:
    """Return a name fit for a folder: the preset's, the file's, or the run's."""
    if path.is_relative_to(PRESETS):
        return str(path.relative_to(PRESETS).with_suffix("")).replace("/", "-")
    return path.resolve().parent.name if path.name == RECIPE else path.stem
