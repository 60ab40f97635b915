"""`paceline recipes`: list presets, all or those that match, or show a recipe with all fields and their origins."""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from paceline.cli.args import split_recipe_args
from paceline.cli.options import RecipesOptions
from paceline.core.errors import RecipeError
from paceline.data.files import printable
from paceline.models.weights_recipe import with_cached_weights_defaults
from paceline.recipe.load import LoadedRecipe, find_recipe, load, preset_names, preset_summary
from paceline.recipe.schema import Recipe
from paceline.recipe.yaml import to_yaml_text

_GROUPS: Final = {
    "start": "To start with, and for your own images",
    "known": "Public datasets",
    "course": "NVIDIA's course on DDP",
    "sc20": 'NERSC\'s tutorial "Deep Learning at Scale" (SC20)',
    "ddp-post": "AI Summer's post on DataParallel and DDP",
    "jsc": 'JSC\'s course "Bringing Deep Learning Workloads to JSC Supercomputers"',
    "quant": "A quantitative study of what makes training fast",
}
"""Headings: of presets without a folder, then of each folder."""


def recipes(options: RecipesOptions) -> int:
    """List the presets that match, or show the named one with its overrides; return the exit code."""
    if options.schema:
        print(json.dumps(recipe_schema(), indent=2))
    elif names := _match_presets(options):
        _print_presets(names, as_json=options.as_json)
    else:
        name, patch = split_recipe_args(options.args)
        loaded, note = with_cached_weights_defaults(load(name, patch))
        _print_recipe(loaded, origin=options.origin, as_json=options.as_json)
        if note:
            print(f"note: {note}", file=sys.stderr)
    return 0


def _match_presets(options: RecipesOptions) -> list[str]:
    """Return the presets to list, none if the arguments name a recipe to show."""
    if not options.args:
        return preset_names()
    pattern, *overrides = options.args
    if "=" in pattern or overrides or options.origin or _is_recipe(pattern):
        return []
    if not set(pattern) & set("*?["):
        pattern = f"*{pattern}*"
    return [name for name in preset_names() if fnmatchcase(name, pattern)]


def _is_recipe(name: str) -> bool:
    try:
        find_recipe(name)
    except RecipeError:
        return os.path.lexists(name)  # a folder of images is named by mistake, not as a part of a name
    return True


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe file, in which every field is optional."""
    schema = _make_optional(Recipe.model_json_schema())
    schema["properties"]["extends"] = {"type": "string", "description": "A preset or a file to extend."}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _make_optional(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_make_optional(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # With optional fields a section can fit several variants of a union, which oneOf would reject.
    renamed = {"anyOf" if key == "oneOf" else key: value for key, value in schema.items() if key != "required"}
    return {key: _make_optional(value) for key, value in renamed.items()}


def _print_presets(names: Sequence[str], *, as_json: bool) -> None:
    summaries = {name: preset_summary(name) for name in names}
    if as_json:
        print(json.dumps(summaries, indent=2))
        return
    indent = max(len(name) for name in summaries) + 4
    # Wrap on a terminal only: a pipe gets one line per preset.
    columns = max(indent + 30, shutil.get_terminal_size().columns) if sys.stdout.isatty() else sys.maxsize
    for group, heading in _GROUPS.items():
        lines = [f"  {name:{indent - 4}}  {each}" for name, each in summaries.items() if _preset_group(name) == group]
        if lines:
            print(f"{heading}:")
        for line in lines:
            print(textwrap.fill(line, columns, subsequent_indent=" " * indent, drop_whitespace=True))
    print("`paceline recipes NAME` shows a recipe, and `paceline train NAME` trains it.")


def _preset_group(name: str) -> str:
    """Return the folder if there is one, else `start` if no public dataset is needed, else `known`."""
    folder, slash, _ = name.partition("/")
    if slash:
        return folder
    return "start" if name.partition("-")[0] in ("digits", "folder", "synthetic") else "known"


def _print_recipe(loaded: LoadedRecipe, *, origin: bool, as_json: bool) -> None:
    values = loaded.recipe.to_dict()
    if as_json:
        origins = {path: loaded.stack.origin(path) for path, _ in _flatten(values)}
        print(json.dumps({"hash": loaded.recipe.hash, "recipe": values, "origin": origins}, indent=2))
    elif origin:
        rows = [(f"{path}: {_value_text(value)}", loaded.stack.origin(path)) for path, value in _flatten(values)]
        width = min(60, max(len(row[0]) for row in rows))
        for text, source in rows:
            print(f"{printable(text):{width}}  # {printable(source)}")
    else:
        print(f"# recipe {loaded.recipe.hash}")
        print(to_yaml_text(values), end="")


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _value_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
