"""Generate the pages of `recipe/` from the schema of recipes: one page per section, and an index of all fields.

After a change of a field, run .venv/bin/python docs/reference/make_recipe.py
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paceline.models.build import MODEL_NAMES
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.base import IMPORT_PATH_FORM, PATH_PATTERN

FOLDER = Path(__file__).with_name("recipe")
INDEX = "README.md"
OWN_PAGES = ("data.source", "data.augment")
"""Fields below the first level that have a page of their own; others are on the page of their section."""
Node = dict[str, Any]
_NAMES = {"object": "mapping", "boolean": "`true`, `false`", "string": "text"}
_LOW = {"exclusiveMinimum": "(", "minimum": "["}
_HIGH = {"exclusiveMaximum": ")", "maximum": "]"}

_INTRODUCTION = """\
# Recipe fields

A recipe is a YAML 1.2 mapping. `extends: NAME` on its first level starts from a preset or another file.
Unknown keys, duplicate keys, tags and anchors are errors. On the command line every field is `KEY=VALUE`,
with its dotted path as the key: `optim.lr=0.4`, `data.augment=[pad_crop,flip]`.

- A **duration** is a number and a unit: `5ep` (epochs), `500st` (optimizer steps), `50000img` (images) or
  `10%` (of the run). A **time** is `90s`, `30min` or `2h`.
- `data.source`, `optim`, `schedule` and `train.loss` have variants. `name` chooses one, and the other fields depend on
  it. Choosing another name drops the fields set for the previous one.
- `train.loss` and the entries of `data.augment` are names, or mappings with a `name`: `{name: pad_crop, padding: 2}`.
- Where `package.module:Name` is among the variants, `name` may be the import path of
  [your own code](../../how-to/extend.md).
- `[a, b)` is a range that includes a and excludes b. "(required)" marks a field without a default: a recipe sets
  either `train.epochs` or `train.steps`.
- `paceline recipes --schema` prints all fields as a JSON schema, for editors; `paceline recipes RECIPE` prints a recipe
  with every field.
"""
_FOOTER = "\n---\n\n*Generated from the schema of recipes by [make_recipe.py](../make_recipe.py).*\n"


class Schema:
    """Render the JSON schema of a recipe as pages, one per section."""

    def __init__(self, schema: Node) -> None:
        self._root = schema

    def pages(self) -> dict[str, str]:
        """Return the pages by file name, in the order of the schema; the first is the index."""
        found = {INDEX: self._index()}
        for path, field in self._own_pages("", self._root):
            found[_file(path)] = f"# {path}\n" + "".join(self._body(path, field, 1)) + _FOOTER
        return found

    def _own_pages(self, path: str, node: Node) -> Iterator[tuple[str, Node]]:
        """Yield (dotted path, field) of every section or union with a page of its own."""
        for name, field in node["properties"].items():
            below = _join(path, name)
            if (not path or below in OWN_PAGES) and (self._variants(field) or self._object(field)):
                yield below, field
                if self._object(field):
                    yield from self._own_pages(below, self._object(field))

    def _index(self) -> str:
        """Return the page with a table of the sections, each with links to its fields."""
        rows = ["| section | what it sets | fields |", "|---|---|---|"]
        for name, field in self._root["properties"].items():
            if not (self._variants(field) or self._object(field)):
                rows.append(f"| `{name}` | {self._meaning(field)} {self._sentence_of_type(field)} | |")
        for path, field in self._own_pages("", self._root):
            links = ", ".join(f"[`{name}`]({_file(path)}#{anchor})" for name, anchor in self._fields(path, field))
            rows.append(f"| [`{path}`]({_file(path)}) | {self._meaning(field)} | {links} |")
        return _INTRODUCTION + "\n## All sections\n\n" + "\n".join(rows) + "\n" + _FOOTER

    def _sentence_of_type(self, field: Node) -> str:
        kind = self._type(field, "")
        return f"{kind[0].upper()}{kind[1:]}; default {self._default(field)}."

    def _fields(self, path: str, field: Node) -> Iterator[tuple[str, str]]:
        """Yield (name, anchor) of the fields on the page of `path`: of a union, its variants."""
        variants = self._variants(field)
        if variants:
            yield from ((name, _slug(name)) for name in variants)
            return
        for name, each in self._object(field)["properties"].items():
            yield name, _anchor(path, name)
            below = _join(path, name)
            if below in OWN_PAGES:
                continue
            if self._variants(each):
                yield from ((f"{name}: {variant}", _slug(variant)) for variant in self._variants(each))
            elif self._object(each):
                yield from ((f"{name}.{inner}", _anchor(below, inner)) for inner in self._object(each)["properties"])

    def _body(self, path: str, field: Node, level: int) -> Iterator[str]:
        """Yield what is below the heading of `field`: its meaning, its table, and its subsections."""
        variants = self._variants(field)
        mark = "#" * (level + 1)
        yield f"\n{_with_links(self._object(field).get('description') or field['description'])}\n"
        for name, node in variants.items():
            yield f"\n{mark} {name}\n\n{_with_links(node['description'])}\n"
            if len(node["properties"]) > 1:
                yield "\n" + self._table(path, node, name)
        if variants:
            return
        yield "\n" + self._table(path, self._object(field))
        if path == "model":
            yield f"\nBuilt-in models: {_join_codes(MODEL_NAMES)}.\n"
        for name, each in self._object(field)["properties"].items():
            below = _join(path, name)
            if below not in OWN_PAGES and (self._variants(each) or self._object(each)):
                yield f"\n{mark} {below}\n"
                yield from self._body(below, each, level + 1)

    def _table(self, path: str, node: Node, variant: str = "") -> str:
        """Return a table of the fields of `node`, each with an anchor."""
        rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
        for name, field in node["properties"].items():
            if name == "name" and "const" in field:  # a variant's name is its heading
                continue
            default = self._default(field) if "default" in field else "(required)"
            anchor = f'<a id="{_anchor(path, name, variant)}"></a>'
            kind = self._type(field, _join(path, name))
            rows.append(f"| {anchor}`{name}` | {kind} | {default} | {self._meaning(field)} |")
        return "\n".join(rows) + "\n"

    def _meaning(self, field: Node) -> str:
        """Return the description of a field in one line, as a row of a table needs it."""
        meaning = field.get("description") or self._object(field).get("description", "")
        return _with_links(" ".join(meaning.split()).replace("|", r"\|"))

    def _resolved(self, node: Node) -> Node:
        return self._root["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node

    def _object(self, field: Node) -> Node:
        """Return the section that `field`, or each of its items, holds; empty for a plain value."""
        choices = (field, *field.get("anyOf", []), *field.get("items", {}).get("anyOf", []))
        options = [self._resolved(option) for option in choices]
        return next((option for option in options if "properties" in option), {})

    def _variants(self, field: Node) -> dict[str, Node]:
        """Return the variants of `field`, or of its items, by name in the order of the schema."""
        options = [field, *field.get("anyOf", []), *field.get("items", {}).get("anyOf", [])]
        union: Node = next((option for option in options if "discriminator" in option), {"oneOf": []})
        nodes = [self._resolved(option) for option in union["oneOf"]]
        return {node["properties"]["name"].get("const", IMPORT_PATH_FORM): node for node in nodes}

    def _type(self, field: Node, path: str) -> str:
        link = f"({_file(path)})" if path in OWN_PAGES else f"(#{_slug(path)})"
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
    units = (("(ep|", "duration"), ("s|min|", "time"), ("^top", "`topK`"))
    return ", ".join(name for unit, name in units if unit in pattern) or "text"


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


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def _file(path: str) -> str:
    """Return the file name of the page of a section."""
    return f"{path.replace('.', '-')}.md"


def _anchor(path: str, name: str, variant: str = "") -> str:
    """Return the anchor of a field's row: its dotted path, with the variant that it belongs to."""
    return ".".join(each for each in (path, _slug(variant), name) if each)


def _slug(heading: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w-]", "", heading.lower())


def _with_links(text: str) -> str:
    """Return a description with the links of a page one folder further down."""
    return text.replace("](../", "](../../")


def pages() -> dict[str, str]:
    """Return the pages by file name."""
    return Schema(Recipe.model_json_schema()).pages()


def write() -> None:
    """Write all pages, and remove those of sections that are gone."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.md"):
        old.unlink()
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
