"""Convert pydantic's validation errors to one line with the field, the value and the fix."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from paceline.core.errors import RecipeError, suggest_similar
from paceline.core.units import count
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.base import IMPORT_PATH_FORM, default_name

if TYPE_CHECKING:
    from paceline.recipe.yaml import YamlDocument

ModelT = TypeVar("ModelT", bound=BaseModel)
_TYPE_NAMES = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
}
# Other trainers' names of fields that `suggest_similar` does not find.
_SYNONYMS = {"learning_rate": "lr", "wd": "weight_decay", "bs": "batch_size", "num_workers": "workers"}


def validate_document(document: "YamlDocument", path: Path, model: type[ModelT]) -> ModelT:
    """Return the content of the file `path` as `model`. Raise `RecipeError` as `file:line: field: message`."""
    try:
        return model.model_validate(document.values)
    except ValidationError as error:
        field, message = explain(error, document.values, model)
        place = f"{path}:{document.find_line(field)}" + (f": {field}" if field else "")
        raise RecipeError(f"{place}: {message}") from None


def explain(error: ValidationError, values: dict[str, Any], model: type[BaseModel] = Recipe) -> tuple[str, str]:
    """Return (dotted path, message) for the first field in `error`; `values` is the mapping that `model` refused."""
    details = error.errors(include_url=False)
    paths = [_error_path(detail, values) for detail in details]
    # Report an unknown key first: it may cause the other errors.
    unknown = (path for path, detail in zip(paths, details, strict=True) if detail["type"] == "extra_forbidden")
    first = next(unknown, paths[0])
    # A union reports the errors of all its branches.
    same = [detail for path, detail in zip(paths, details, strict=True) if path == first]
    message = _message(first, same, model)
    # Errors that other branches of a union report for a whole section do not count.
    fields = {path for path in paths if not any(other.startswith((f"{path}.", f"{path}[")) for other in paths)}
    others = len(fields - {first})
    return first, message + (f"; {others} more like this" if others else "")


def _error_path(detail: ErrorDetails, values: dict[str, Any]) -> str:
    if detail["type"] == "refused":  # validators of several sections name the field themselves
        return str(detail["ctx"]["path"])
    path = _field_path(detail["loc"], values, detail["type"] == "missing")
    # An unknown variant is an error of the section's `name`; in a list, whose items may be bare names, of the item.
    return f"{path}.name" if detail["type"] == "union_tag_invalid" and not path.endswith("]") else path


def _field_path(loc: tuple[str | int, ...], values: Any, missing: bool) -> str:
    """Return `loc` as a dotted path, without the names of union branches."""
    path = ""
    for position, item in enumerate(loc):
        if isinstance(values, dict) and item in values:
            path, values = f"{path}.{item}", values[str(item)]
        elif isinstance(values, list | tuple) and isinstance(item, int) and item < len(values):
            path, values = f"{path}[{item}]", values[item]
        # Items that are not in `values` name branches of a union, but for the last one of a missing field.
        elif missing and position == len(loc) - 1 and isinstance(item, str):
            path = f"{path}.{item}"
    return path.lstrip(".")


def _message(path: str, details: list[ErrorDetails], model: type[BaseModel]) -> str:
    detail = details[0]
    leaf = path.rpartition(".")[2]
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_field_message(path, leaf, detail["loc"][:-1], model)
        case "missing" if isinstance(detail["loc"][-1], int):  # items of a tuple
            return f"{_shorten_value(detail['input'])} is too short (write {int(details[-1]['loc'][-1]) + 1} values)"
        case "too_short" | "too_long":
            bounds = {"min_length": "at least", "max_length": "at most"}
            key = next(key for key in bounds if key in detail["ctx"])
            number = detail["ctx"][key]
            return f"{_shorten_value(detail['input'])} should have {bounds[key]} {count(number, 'value')}"
        case "missing":
            return f"is needed (set {path}=...)"
        case "union_tag_invalid":
            # pydantic gives the tags only as text
            known = re.findall(r"'([^']+)'", detail["ctx"]["expected_tags"])
            tag = detail["ctx"]["tag"]
            return f"{tag!r} is not one of {', '.join(known)}{suggest_similar(tag, known)}"
        case "union_tag_not_found" if isinstance(detail["input"], dict):
            return f"{_shorten_value(detail['input'])} names no variant (write {{name: ...}})"
        case "refused" | "value_error":
            return str(detail["ctx"].get("message") or detail["ctx"]["error"])
        case "model_type" | "model_attributes_type" | "dict_type" | "union_tag_not_found":
            return f"{_shorten_value(detail['input'])} is a value where a section is needed (set a field below it)"
    wanted = ", or ".join(dict.fromkeys(_expected_value(each) for each in details))
    return f"{_shorten_value(detail['input'])} should be {wanted}"


def _unknown_field_message(path: str, leaf: str, loc: tuple[str | int, ...], model: type[BaseModel]) -> str:
    section = path.rpartition(".")[0]
    sections, variants = _sections_at(loc, model), _sections_at(loc[:-1], model)
    known = list(sections[0].model_fields)
    others = variants if len(variants) > 1 else []
    owners = sorted(str(_variant_name(each)) for each in others if leaf in each.model_fields)
    # Most specific advice first: an argument of a plugin, a field of another variant, another trainer's name, the right
    # field in another section, a typing error.
    if loc and loc[-1] == IMPORT_PATH_FORM:
        return f"no such field (one of {', '.join(known)}; arguments of your own code are {section}.args.{leaf})"
    if owners:
        chosen, fields = loc[-1], ", ".join(known)
        return f"has no effect with {chosen}, only with {', '.join(owners)} ({chosen} has {fields})"
    if (synonym := _SYNONYMS.get(leaf)) in known:
        return f"no such field (did you mean {'.'.join(filter(None, (section, synonym)))!r}?)"
    elsewhere = paths_of(leaf) if leaf != "name" and model is Recipe else []
    if elsewhere:
        return f"no such field (did you mean {' or '.join(map(repr, elsewhere))}?)"
    return "no such field" + (suggest_similar(leaf, known, section) or f" (one of {', '.join(known)})")


def _expected_value(detail: ErrorDetails) -> str:
    """Return what one branch of a union accepts."""
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"]).rpartition("(")[2].rstrip(")")  # our own messages end in "(FIX)"
    if detail["type"] in _TYPE_NAMES:
        return _TYPE_NAMES[detail["type"]]
    return detail["msg"].removeprefix("Input should be ").removeprefix("a valid ")


def _shorten_value(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def choices() -> dict[str, tuple[str, ...]]:
    """Return the allowed words of each field by its path, over all variants; () for numbers and text."""
    by_path: dict[str, tuple[str, ...]] = {}
    for path, values in _fields(Recipe, ""):
        by_path[path] = tuple(dict.fromkeys((*by_path.get(path, ()), *values)))
    return by_path


def paths_of(name: str) -> list[str]:
    """Return the paths of all fields called `name`: `epochs` or `train.epochs` gives `train.epochs`."""
    return [path for path in choices() if path == name or path.endswith(f".{name}")]


def _fields(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, list[str]]]:
    for name, field in section.model_fields.items():
        kinds = list(_kinds(field.annotation))
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        for each in inner:
            yield from _fields(each, f"{prefix}{name}.")
        values = [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
        if values or not inner:
            yield f"{prefix}{name}", values


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, or the type itself, without `Annotated`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _kinds(member)
    else:
        yield annotation


def _sections_at(loc: tuple[str | int, ...], model: type[BaseModel]) -> list[type[BaseModel]]:
    """Return the sections at a pydantic location below `model`: one, or all variants if none is named."""
    found = [model]
    for item in loc:
        chosen = [each for each in found if item in (_variant_name(each), each.__name__)]
        fields = [each.model_fields[str(item)] for each in found if item in each.model_fields]
        # Other items are indices of lists and names of validators.
        found = chosen or [each for field in fields for each in _sections_in(field.annotation)] or found
    return found


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _sections_in(argument)]


def _variant_name(section: type[BaseModel]) -> str | None:
    return default_name(section) if "name" in section.model_fields else None
