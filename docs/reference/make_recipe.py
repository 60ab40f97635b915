"""Generate `recipe.md` from the schema of recipes.

After a change of a field, run .venv/bin/python docs/reference/make_recipe.py
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paceline.models.build import MODEL_NAMES
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.base import IMPORT_PATH_FORM, PATH_PATTERN

PAGE = Path(__file__).with_name("recipe.md")
Node = dict[str, Any]
_NAMES = {"object": "mapping", "boolean": "`true`, `false`", "string": "text"}
_LOW = {"exclusiveMinimum": "(", "minimum": "["}
_HIGH = {"exclusiveMaximum": ")", "maximum": "]"}

_INTRODUCTION = """\
# Recipe fields

This page is written by [make_recipe.py](make_recipe.py) from the schema in `src/paceline/recipe/schema/`; a
test fails when the two differ. `paceline recipes --schema` prints the same as a JSON schema, for editors.

A recipe is a YAML 1.2 mapping. `extends: NAME` on its first level starts from a preset or another file.
Unknown keys, duplicate keys, tags and anchors are errors. On the command line every field is `KEY=VALUE`,
with its dotted path as the key: `optim.lr=0.4`, `data.augment=[pad_crop,flip]`.

- A **duration** is a number and a unit: `5ep` (epochs), `500st` (optimizer steps), `50000img` (images) or
  `10%` (of the run). A **time** is `90s`, `30min` or `2h`.
- `data.source`, `optim` and `schedule` have variants. `name` chooses one, and the other fields depend on it.
  Choosing another name drops the fields set for the previous one.
- An entry of `data.augment` is a name, or a mapping with a `name`: `{name: pad_crop, padding: 2}`.
- Where `package.module:Name` is among the variants, `name` may be the import path of
  [your own code](../how-to/extend.md).
- `[a, b)` is a range that includes a and excludes b. "(to be set)" marks a field without a default: a recipe sets
  either `train.epochs` or `train.steps`.
"""


class Schema:
    """Render the JSON schema of a recipe section by section."""

    def __init__(self, schema: Node) -> None:
        self._root = schema

    def page(self) -> str:
        """Return the page."""
        return _INTRODUCTION + "".join(self._section("", self._root))

    def _section(self, path: str, node: Node) -> Iterator[str]:
        """Yield the parts of the section at `path` and of its subsections."""
        heading = f"## {path}" if path else "## All sections"
        yield f"\n{heading}\n"
        if path and "description" in node:
            yield f"\n{node['description']}\n"
        yield "\n" + self._table(path, node)
        if path == "model":
            yield f"\nBuilt-in models: {_join_codes(MODEL_NAMES)}.\n"
        for name, field in node["properties"].items():
            below = f"{path}.{name}".lstrip(".")
            variants = self._variants(field)
            if variants:
                yield from self._variant_sections(below, field, variants)
            elif self._object(field):
                yield from self._section(below, self._object(field))

    def _variant_sections(self, path: str, field: Node, variants: dict[str, Node]) -> Iterator[str]:
        yield f"\n## {path}\n\n{field['description']}\n"
        for name, node in variants.items():
            yield f"\n### {name}\n\n{node['description']}\n"
            if len(node["properties"]) > 1:
                yield "\n" + self._table(path, node)

    def _table(self, path: str, node: Node) -> str:
        """Return a table of the fields of `node`."""
        rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
        for name, field in node["properties"].items():
            if name == "name" and "const" in field:  # a variant's name is its heading
                continue
            below = f"{path}.{name}".lstrip(".")
            default = self._default(field) if "default" in field else "(to be set)"
            meaning = field.get("description") or self._object(field).get("description", "")
            meaning = " ".join(meaning.split()).replace("|", r"\|")  # a row is one line
            rows.append(f"| `{name}` | {self._type(field, below)} | {default} | {meaning} |")
        return "\n".join(rows) + "\n"

    def _resolved(self, node: Node) -> Node:
        return self._root["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node

    def _object(self, field: Node) -> Node:
        """Return the section that `field` holds; empty for a plain value."""
        options = [self._resolved(option) for option in (field, *field.get("anyOf", []))]
        return next((option for option in options if "properties" in option), {})

    def _variants(self, field: Node) -> dict[str, Node]:
        """Return the variants of `field`, or of its items, by name in the order of the schema."""
        options = [field, *field.get("items", {}).get("anyOf", [])]
        union: Node = next((option for option in options if "discriminator" in option), {"oneOf": []})
        nodes = [self._resolved(option) for option in union["oneOf"]]
        return {node["properties"]["name"].get("const", IMPORT_PATH_FORM): node for node in nodes}

    def _type(self, field: Node, path: str) -> str:
        link = f"(#{path.replace('.', '')})"
        if self._variants(field):
            return f"[{'list' if 'items' in field else 'one'} of]{link} {_join_codes(self._variants(field))}"
        if "anyOf" in field:
            return " or ".join(self._type(option, path) for option in field["anyOf"])
        field = self._resolved(field)
        if "properties" in field:
            return f"[section]{link}"
        if "enum" in field or "const" in field:
            return _join_codes(field.get("enum", [field.get("const")]))
        if "pattern" in field:
            return _pattern_name(field["pattern"])
        match field["type"]:
            case "array" if "prefixItems" in field:
                return f"[{', '.join(self._type(item, path) for item in field['prefixItems'])}]"
            case "array":
                return f"list of {self._type(field['items'], path)}"
        return _NAMES.get(field["type"]) or f"{field['type']}{_bounds(field)}"

    def _default(self, field: Node) -> str:
        default = field["default"]
        if isinstance(default, dict) and field.get("type") != "object":
            return f"`{default['name']}`" if self._variants(field) else ""
        return f"`{_format_default(default)}`"


def _format_default(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.4g}"
        case dict():
            return "{}"
        case list():
            return f"[{', '.join(_format_default(item) for item in value)}]"
    return str(value)


def _pattern_name(pattern: str) -> str:
    """Return the name of a text pattern."""
    if pattern == PATH_PATTERN:
        return "import path"
    for unit, what in (("min|", "time"), ("ep|", "duration")):
        if unit in pattern:
            return what
    return "text"


def _join_codes(values: Iterable[object]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _bounds(field: Node) -> str:
    low = next((f"{mark}{_number(field[key])}" for key, mark in _LOW.items() if key in field), "")
    high = next((f"{_number(field[key])}{mark}" for key, mark in _HIGH.items() if key in field), "")
    if low and high:
        return f" in {low}, {high}"
    assert not high, f"{field}: a bound above without one below is not written yet"
    return f" {'>' if low[0] == '(' else '>='} {low[1:]}" if low else ""


def _number(value: float) -> str:
    return "2^63" if value == 2**63 else f"{value:g}"


def page() -> str:
    """Return the page."""
    return Schema(Recipe.model_json_schema()).page()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
