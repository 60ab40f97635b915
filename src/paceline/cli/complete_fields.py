"""The fields of a recipe by their dotted paths, with the words that each takes, for completion."""

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from paceline.recipe.schema import Recipe
from paceline.recipe.schema.section import Section


def sections() -> list[str]:
    """Return how the paths of fields begin: `optim.`, and `seed=` for a field in no section."""
    return list(dict.fromkeys(f"{head}." if rest else f"{head}=" for head, _, rest in _parted(choices())))


def choices() -> dict[str, tuple[str, ...]]:
    """Return the words that each field may be set to, by its path; none where it takes numbers or text alone.

    Of a section that has a `name`, fields of all that it may name are there.
    """
    found: dict[str, tuple[str, ...]] = {}
    for path, words in _fields(Recipe, ""):
        found[path] = tuple(dict.fromkeys((*found.get(path, ()), *words)))
    return found


def _parted(paths: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, str, str]]:
    return (path.partition(".") for path in paths)


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
