"""The fields of a recipe by their dotted paths, and the words that each takes: for hints and for completion."""

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from paceline.recipe.schema import Recipe
from paceline.recipe.schema.section import Section


def choices() -> dict[str, tuple[str, ...]]:
    """Return the words that each field may be set to, by its path; none where it takes numbers or text alone.

    Of a section that has a `name`, fields of all that it may name are there.
    """
    found: dict[str, tuple[str, ...]] = {}
    for path, words in _fields(Recipe, ""):
        found[path] = tuple(dict.fromkeys((*found.get(path, ()), *words)))
    return found


def paths_of(name: str) -> list[str]:
    """Return the paths of the fields that end in `name`, such as `train.epochs` for `epochs`; a path is its own end."""
    return [path for path in choices() if path == name or path.endswith(f".{name}")]


def _fields(section: type[Section], prefix: str) -> Iterator[tuple[str, list[str]]]:
    for name, field in section.model_fields.items():
        kinds = list(_kinds(field.annotation))
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        for each in inner:
            yield from _fields(each, f"{prefix}{name}.")
        words = [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        if words or not inner:
            yield f"{prefix}{name}", words


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield what a value may be: the members of unions, less what is said of them."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _kinds(member)
    else:
        yield annotation
