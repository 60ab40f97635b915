"""Read and write recipe YAML: plain data of bounded size, with line numbers."""

from dataclasses import dataclass, field
from datetime import date
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent, DocumentStartEvent, Event, ScalarEvent
from ruamel.yaml.reader import ReaderError

from paceline.core.errors import RecipeError

MAX_FILE_BYTES = 500_000
MAX_DEPTH = 20
MAX_VALUES = 60_000  # keys and values: enough for the class weights of 21,841 classes, which take 4 s to read


@dataclass(frozen=True)
class YamlDocument:
    """A mapping from YAML: its plain `values`, and the line (from 1) of each path, such as `rungs[1].name`."""

    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)

    def find_line(self, path: str) -> int:
        """Return the line of `path`, or of the section around it; 1 if neither is in the file."""
        while path and path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self.lines.get(path, 1)


def read_yaml_file(path: Path) -> YamlDocument:
    """Read the mapping in `path`. Raise `RecipeError` as `file:line: problem (fix)`."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RecipeError(f"{path}: is over {MAX_FILE_BYTES:,} bytes, the limit for recipes (name another file)")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror} (name a recipe file)") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: is not UTF-8 text (name a recipe file)") from None
    return read_yaml_text(text, str(path))


def read_yaml_text(text: str, name: str) -> YamlDocument:
    """Read the mapping in `text`; `name` is the file in errors. Raise `RecipeError`."""
    loaded = _load(text, name)
    if loaded is None:
        return YamlDocument({})
    if not isinstance(loaded, CommentedMap):
        raise RecipeError(
            f"{name}:1: a recipe is a mapping of sections, not a list or a value (write `train: {{epochs: 10}}`)"
        )
    lines: dict[str, int] = {}
    _collect_lines(loaded, "", lines)
    values = _plain_value(loaded, name)
    assert isinstance(values, dict)
    return YamlDocument(values, lines)


def read_yaml_value(text: str, name: str) -> Any:
    """Read one YAML value, such as the right side of `optim.lr=0.4`. Raise `RecipeError`."""
    return _plain_value(_load(text, name), name)


def to_yaml_text(values: dict[str, Any]) -> str:
    """Return `values` as YAML 1.2 that `read_yaml_text` reads back to an equal mapping."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.allow_unicode = True
    # Write equal values out in full: `read_yaml_text` refuses aliases.
    yaml.representer.ignore_aliases = lambda data: True
    yaml.width = 110
    out = StringIO()
    yaml.dump(values, out)
    return out.getvalue()


def _load(text: str, name: str) -> Any:
    try:
        _check_plain_data(text, name)
        return YAML(typ="rt", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        position = f"{mark.line + 1}:{mark.column + 1}" if mark else "1"
        problem = " ".join(str(error.problem).split())
        raise RecipeError(f"{name}:{position}: {problem} (fix the YAML)") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(f"{name}:{line}: {text[error.position]!r} is not allowed in YAML (remove it)") from None
    except (YAMLError, ValueError, RecursionError, AssertionError) as error:  # ruamel asserts on a bad %YAML directive
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(f"{name}: is not YAML: {' '.join(str(error).split())[:120]} (fix the file)") from None


def _check_plain_data(text: str, name: str) -> None:
    # On events, before any object is built: aliases and deep nesting can exhaust memory (billion laughs).
    depth = num_values = 0
    for event in YAML(typ="rt", pure=True).parse(text):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        num_values += isinstance(event, ScalarEvent)
        problem = f"more than {MAX_DEPTH} levels are" if depth > MAX_DEPTH else _why_not_plain(event)
        if num_values > MAX_VALUES:
            problem = f"more than {MAX_VALUES:,} keys and values are"
        if problem:
            line = event.start_mark.line + 1
            raise RecipeError(f"{name}:{line}: {problem} not allowed in a recipe (write a plain value)")


def _why_not_plain(event: Event) -> str:
    """Return the start of a message on an event that is more than plain data, or ""."""
    if getattr(event, "anchor", None) is not None:
        return "anchors and aliases are"
    tag = getattr(event, "ctag", None)
    if tag is not None:
        return f"tag {tag} is"
    if isinstance(event, DocumentStartEvent) and (event.version or event.tags):
        return "directives are"
    return "merge keys are" if isinstance(event, ScalarEvent) and event.value == "<<" and event.implicit[0] else ""


def _collect_lines(node: Any, prefix: str, lines: dict[str, int]) -> None:
    if isinstance(node, CommentedMap):
        for key, value in node.items():
            path = f"{prefix}{key}"
            lines[path] = node.lc.key(key)[0] + 1
            _collect_lines(value, f"{path}.", lines)
    if isinstance(node, CommentedSeq):
        for index, value in enumerate(node):
            path = f"{prefix.removesuffix('.')}[{index}]"
            lines[path] = node.lc.item(index)[0] + 1
            _collect_lines(value, f"{path}.", lines)


def _key_problem(key: Any) -> str:
    """Return what is wrong with a key that is not a printable string."""
    if not isinstance(key, int | float | date):
        return f"key {key!r} is not a word (fix it)"
    out = StringIO()
    YAML(typ="rt", pure=True).dump(key, out)  # as in the file, including leading zeros
    written = out.getvalue().partition("\n")[0]
    return f'key {written} is not a word (write it in quotes: "{written}")'


def _plain_value(node: Any, name: str, line: int = 0) -> Any:
    """Convert ruamel's round-trip types to plain Python values; `line` is that of `node`, 0 if unknown."""
    location = f"{name}:{line}" if line else name
    if isinstance(node, CommentedMap):
        for key in node:
            if not isinstance(key, str) or not key.isprintable():
                raise RecipeError(f"{name}:{node.lc.key(key)[0] + 1}: {_key_problem(key)}")
        return {str(key): _plain_value(value, name, node.lc.key(key)[0] + 1) for key, value in node.items()}
    if isinstance(node, CommentedSeq):
        return [_plain_value(value, name, node.lc.item(number)[0] + 1) for number, value in enumerate(node)]
    if node is None or isinstance(node, bool):
        return node
    if isinstance(node, int):  # ruamel's subclasses remember how a number was written
        return int(node)
    if isinstance(node, float):
        return float(node)
    if isinstance(node, str):
        return str(node)
    raise RecipeError(
        f"{location}: {node!r} is a {type(node).__name__}, which recipes do not support (write a number or text)"
    )
