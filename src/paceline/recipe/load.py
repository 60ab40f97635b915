"""Load a recipe: merge YAML files, presets and overrides, validate them, and record the origin of each value."""

import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Final, Self

from pydantic import ValidationError

from paceline.core.errors import RecipeError, suggest_similar
from paceline.core.run_dir import RECIPE, is_run
from paceline.core.urls import HOW_TO_PASS_CREDENTIALS, find_secret, public_url
from paceline.recipe.errors import choices, explain
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.base import is_plugin_name
from paceline.recipe.schema.model import BUILT_IN_MODELS_ONLY
from paceline.recipe.schema.train import REPLACED_WHOLE, Train
from paceline.recipe.yaml import read_yaml_file, read_yaml_value

DEFAULT = "digits"
_COMMAND_LINE = "command line"
PRESETS = Path(str(resources.files("paceline.recipe") / "presets"))
ALTERNATIVES: Final = (("train", "epochs", "steps"), ("data", "batch_size", "rank_batch_size"))
"""Sections with two fields for the same quantity in different units; the later layer wins."""
_KEY = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)*")


@dataclass(frozen=True)
class Layer:
    """One mapping of recipe fields and its `origin`; `lines` has the line of each dotted path in a file."""

    values: dict[str, Any]
    origin: str
    lines: dict[str, int] = field(default_factory=dict)

    def location(self, path: str) -> str:
        """Return `file:line` of a dotted path, or the origin if it has no lines."""
        return f"{self.origin}:{self.lines[path]}" if path in self.lines else self.origin


@dataclass(frozen=True)
class LayerStack:
    """Merged layers: the `values`, the origin of each dotted leaf path, and the origins that are `files`."""

    values: dict[str, Any]
    origins: dict[str, str]
    files: frozenset[str] = frozenset()

    def origin(self, path: str) -> str:
        """Return the origin of `path`, or of the section around it; `default` if it was not set."""
        while path:  # from the field outwards
            if path in self.origins:
                return self.origins[path]
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return "default"

    def with_defaults(self, values: Mapping[str, Any], origin: str) -> Self:
        """Return a copy with `values` by dotted path, from `origin`, at the paths of fields that no layer set."""
        more = {path: value for path, value in values.items() if self.origin(path) == "default"}
        merged = _copied(self.values)
        for path, value in more.items():
            *sections, name = path.split(".")
            section = merged
            for each in sections:
                section = section.setdefault(each, {})
            section[name] = value
        return replace(self, values=merged, origins={**self.origins, **dict.fromkeys(more, origin)})

    def without(self, paths: Collection[str]) -> Self:
        """Return a copy without the fields and sections at the dotted `paths`."""
        merged = _copied(self.values)
        for path in paths:
            *sections, name = path.split(".")
            _get_section(merged, sections).pop(name, None)
        remaining = {path: origin for path, origin in self.origins.items() if _has_path(merged, path)}
        return replace(self, values=merged, origins=remaining)

    def file_of(self, path: str) -> str:
        """Return the file that set `path`, or the section around it, or ""."""
        origin = self.origin(path)
        return next((file for file in self.files if origin == file or origin.startswith(f"{file}:")), "")


@dataclass(frozen=True)
class Patch:
    """Assignments of plain values to dotted paths, applied together, so `optim.name` may come after `optim.lr`."""

    assignments: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, assignments: list[str]) -> Self:
        """Parse `KEY=VALUE` words, with YAML values: `1e-3` is a number and `[flip]` a list."""
        return cls(tuple(_parse_assignment(each) for each in assignments))

    def values(self) -> dict[str, Any]:
        """Return the assignments as one nested mapping; later ones win."""
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


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, its short name, and the origin of each value; `base` is without the command line."""

    recipe: Recipe
    name: str
    stack: LayerStack
    base: LayerStack

    def is_from_command_line(self, path: str) -> bool:
        """Whether `path` was set on the command line, or by a script's overrides."""
        return self.stack.origin(path) == _COMMAND_LINE

    def changes(self) -> list[dict[str, Any]]:
        """Return the fields that differ from the named recipe, those of the command line first.

        Each has `field`, the `base` value (None: no such field), its `value` (None: gone), and `typed`.
        """
        try:
            before = dict(iter_settings(validate(self.base).to_dict()))
        except RecipeError:  # it is complete only with the command line
            before = dict(iter_settings(self.base.values))
        after = dict(iter_settings(self.recipe.to_dict()))
        fields = [each for each in {**after, **before} if before.get(each) != after.get(each)]
        rows: list[dict[str, Any]] = []
        for each in fields:
            typed = self.is_from_command_line(each)
            rows.append({"field": each, "base": before.get(each), "value": after.get(each), "typed": typed})
        return sorted(rows, key=lambda row: not row["typed"])


def iter_settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each field in nested sections; an empty mapping is one value."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from iter_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def load(name: str = DEFAULT, patch: Patch | None = None) -> LoadedRecipe:
    """Load the preset, file or run directory `name` with `patch` over it. Raise `RecipeError`."""
    path = find_recipe(name)
    chain = _load_chain(path)
    stack = merge_layers([*chain, Layer((patch or Patch()).values(), _COMMAND_LINE)])
    return LoadedRecipe(validate(stack), _short_name(path), stack, merge_layers(chain))


def load_values(values: Mapping[str, Any], patch: Patch | None = None, *, name: str = "script") -> LoadedRecipe:
    """Load a recipe from plain `values`, with `patch` over them. Raise `RecipeError`.

    `extends` in `values` starts from a preset or a file.
    """
    settings = dict(values)
    base = settings.pop("extends", None)
    below = [] if base is None else _load_chain(find_recipe(str(base)))
    chain = [*below, Layer(settings, name)]
    stack = merge_layers([*chain, Layer((patch or Patch()).values(), _COMMAND_LINE)])
    return LoadedRecipe(validate(stack), name, stack, merge_layers(chain))


def load_any(recipe: str | Path | Recipe | Mapping[str, Any], patch: Patch | None = None) -> LoadedRecipe:
    """Load a recipe from a name, a path, a mapping or a `Recipe`, with `patch` over it. Raise `RecipeError`."""
    match recipe:
        case str() | Path():
            return load(str(recipe), patch)
        case Recipe():
            return load_values(recipe.given_values(), patch)
        case Mapping():
            return load_values(recipe, patch)
        case _:
            raise RecipeError(f"recipe: {recipe!r} is not a recipe (give a name, a path, a mapping or a Recipe)")


def validate(stack: LayerStack) -> Recipe:
    """Return the typed recipe. Raise `RecipeError` for the first invalid field."""
    try:
        return Recipe.model_validate(stack.values)
    except ValidationError as error:
        path, message = explain(error, stack.values)
        origin = stack.origin(path)
        prefix = "" if origin in ("default", _COMMAND_LINE) else f"{origin}: "
        raise RecipeError(f"{prefix}{path or 'recipe'}: {message}") from None


def find_recipe(name: str) -> Path:
    """Return the file of a preset, a path or a run directory. Raise `RecipeError`."""
    # Error messages show the name, so a URL given by mistake must not show its password.
    secret = find_secret(name)
    if secret:
        raise RecipeError(
            f"{public_url(name)}: the URL holds {secret}, and is not a recipe ({HOW_TO_PASS_CREDENTIALS})"
        )
    try:
        return _find_file(name)
    except OSError as error:
        raise RecipeError(f"{name!r}: cannot be read: {error.strerror} (see `paceline recipes`)") from None


def _find_file(name: str) -> Path:
    path, preset = _expand_user(name), PRESETS / f"{name}.yaml"
    if is_run(path):  # first, so that a run directory may have the name of a preset
        return path / RECIPE
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise RecipeError(f"{path}: no such recipe file (see `paceline recipes` for the presets)")
        return path
    if name in preset_names():
        return preset
    if (path.suffix == ".pack" or (path / "index.pack").is_file()) and name.isprintable():
        raise RecipeError(
            f"{name}: is a pack, not a recipe (write: paceline train folder data.source.name=pack "
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
            f"{path}: is a folder without {RECIPE}, not a run (images: paceline train folder data.source.root=...)"
        )
    # From here on `name` is not a recipe: find the most helpful message.
    if "." in name and name in choices():
        raise RecipeError(f"{name!r}: is a field, not a recipe (write {name}=VALUE)")
    hint = suggest_similar(name, preset_names()) or " (see `paceline recipes`)"
    family = [each for each in preset_names() if name and each.startswith(f"{name}-")]
    if len(family) > 1:
        hint = f" (did you mean one of {', '.join(family)}?)"
    raise RecipeError(f"{name!r}: is neither a preset, a recipe file nor a run directory{hint}")


def _expand_user(name: str) -> Path:
    with suppress(RuntimeError):  # no such user
        return Path(name).expanduser()
    return Path(name)


def preset_names() -> list[str]:
    """Return the names of the presets, sorted."""
    return sorted(str(path.relative_to(PRESETS).with_suffix("")) for path in PRESETS.rglob("*.yaml"))


def preset_summary(name: str) -> str:
    """Return the first line of a preset's header."""
    first = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()


def read_chain(
    path: Path, find_base: Callable[[object, Path, str], Path], origin: Callable[[Path], str]
) -> list[Layer]:
    """Return the layers of `path` and all that it `extends`, the base first.

    `find_base` returns the file of a base, from its name, the folder of the file that names it, and the start of an
    error message; `origin` names a file in later messages.
    """
    layers: list[Layer] = []
    seen: list[Path] = []
    while True:  # from `path` to its root
        if path.resolve() in seen:
            raise RecipeError(f"{path}: extends itself (fix the chain of `extends`)")
        seen.append(path.resolve())
        document = read_yaml_file(path)
        values: dict[str, Any] = dict(document.values)
        base = values.pop("extends", None)
        layers.insert(0, Layer(values, origin(path), document.lines))
        if base is None:
            return layers
        path = find_base(base, path.parent, f"{layers[0].location('extends')}: extends:")


def _load_chain(path: Path) -> list[Layer]:
    return read_chain(path, _find_base, _origin)


def _find_base(base: object, folder: Path, where: str) -> Path:
    if not isinstance(base, str):
        raise RecipeError(f"{where} {base!r} is not a name (write a preset or a file)")
    beside = folder / _expand_user(base)  # relative to the file that names it, not to the working directory
    try:
        return find_recipe(str(beside) if beside.suffix in (".yaml", ".yml") else base)
    except RecipeError as error:
        raise RecipeError(f"{where} {error}") from None


def _origin(path: Path) -> str:
    return str(path.relative_to(PRESETS)) if path.is_relative_to(PRESETS) else str(path)


def _short_name(path: Path) -> str:
    """Return the name of a preset, file or run, fit for a folder."""
    if path.is_relative_to(PRESETS):
        return str(path.relative_to(PRESETS).with_suffix("")).replace("/", "-")
    return path.resolve().parent.name if path.name == RECIPE else path.stem


def merge_layers(layers: Iterable[Layer]) -> LayerStack:
    """Merge layers, later ones over earlier ones."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    files: set[str] = set()
    variants = _default_variants()
    for layer in layers:
        files.update({layer.origin} if layer.lines else ())
        # First drop fields that do not apply any more: those of another variant, the arguments of another model, and
        # the other of two alternatives.
        _drop_replaced(values, layer.values, variants)
        _merge_into(values, layer.values, layer, origins)
    _name_variants(values, variants)
    # Dropped fields have no origin any more.
    remaining = {path: origin for path, origin in origins.items() if _has_path(values, path)}
    return LayerStack(values, remaining, frozenset(files))


def _default_variants() -> dict[str, str]:
    """Return the default variant of each section that has variants."""
    fields = Recipe.model_fields
    return {
        "data.source": fields["data"].default.source.name,
        "optim": fields["optim"].default.name,
        "schedule": fields["schedule"].default.name,
        "train.loss": Train.model_fields["loss"].default.name,
    }


def _drop_replaced(values: dict[str, Any], over: dict[str, Any], variants: dict[str, str]) -> None:
    for path, default in variants.items():
        *parents, leaf = path.split(".")
        base, change = _get_section(values, parents), _get_section(over, parents)
        if not isinstance(change.get(leaf), dict):
            continue
        if isinstance(base.get(leaf), str):  # a bare name
            base[leaf] = {"name": base[leaf]}
        old, new = base.get(leaf), change[leaf]
        if isinstance(old, dict) and "name" in new and new["name"] != old.get("name", default):
            del base[leaf]
    _drop_model_fields(_get_section(values, ["model"]), _get_section(over, ["model"]))
    for section, one, other in ALTERNATIVES:
        base, change = _get_section(values, [section]), _get_section(over, [section])
        for given, replaced in ((one, other), (other, one)):
            # If one layer sets both, validation refuses it.
            if change.get(given, "auto") != "auto" and replaced not in change:
                base.pop(replaced, None)


def _drop_model_fields(model: dict[str, Any], change: dict[str, Any]) -> None:
    """Drop the arguments of a replaced model, and fields without effect on a plugin."""
    name = change.get("name")
    if not isinstance(name, str) or name == model.get("name"):
        return
    model.pop("args", None)
    if is_plugin_name(name):
        for field in BUILT_IN_MODELS_ONLY:
            if model.get(field) != "sync_batch":  # which any model can be converted to
                model.pop(field, None)


def _name_variants(values: dict[str, Any], variants: dict[str, str]) -> None:
    """Write the default name into sections that set fields without a name."""
    for path, default in variants.items():
        section = _get_section(values, path.split("."))
        if section:
            section.setdefault("name", default)


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of nested mappings."""
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in values.items()}


def _get_section(values: dict[str, Any], path: list[str]) -> dict[str, Any]:
    for key in path:
        child = values.get(key)
        if not isinstance(child, dict):
            return {}
        values = child
    return values


def _merge_into(
    values: dict[str, Any], over: dict[str, Any], layer: Layer, origins: dict[str, str], prefix: str = ""
) -> None:
    """Merge `over`, a part of `layer`, into `values`, and record where each value comes from, both in place."""
    for key, value in over.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and path not in REPLACED_WHOLE:
            if not isinstance(values.get(key), dict):
                values[key] = {}
            _merge_into(values[key], value, layer, origins, f"{path}.")
        else:
            values[key] = value
            origins[path] = layer.location(path)


def _has_path(values: Any, path: str) -> bool:
    for key in path.split("."):
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True


def _refuse_key_below_value(path: str, value: Any) -> None:
    for whole in REPLACED_WHOLE:
        if path.startswith(f"{whole}."):
            one = f"{{{path.removeprefix(f'{whole}.')}: {value}}}"
            raise RecipeError(f"{path}: {whole} is one value, not a section (write {whole}={one})")


def _set_value(section: dict[str, Any], key: str, value: Any, path: str) -> None:
    """Set the field at `path`; a mapping is merged into the previous one."""
    # Mappings are copied, so that a patch can be applied again.
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


def _parse_assignment(word: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    if not equals or not _KEY.fullmatch(key):
        raise RecipeError(f"{word!r}: is not an override (write KEY=VALUE, such as optim.lr=0.4)")
    return key, read_yaml_value(text, key)
