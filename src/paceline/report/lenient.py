"""Parse `result.json` of any version: use the known fields and name the unknown ones."""

from math import inf
from typing import Any

from pydantic import ValidationError

from paceline.core.results import RunResult
from paceline.report.words import MAX_MAGNITUDE, clean_text


def parse_result(values: dict[str, Any]) -> tuple[RunResult | None, str]:
    """Return the result in `values`, or None, and a description of what is wrong ("" if nothing is).

    Ignore fields that a newer version wrote.
    """
    if not values:
        return None, ""
    if _has_huge_number(values):
        return None, "result.json: is not a result: it has numbers with a hundred digits"
    try:
        return RunResult.model_validate(values), ""
    except ValidationError as error:
        unknown = [each["loc"] for each in error.errors() if each["type"] == "extra_forbidden"]
        others = [each for each in error.errors() if each["type"] != "extra_forbidden"]
    if others:
        location = ".".join(str(key) for key in others[0]["loc"])
        return None, clean_text(f"result.json: is not a result: {location}: {others[0]['msg']}", 300)
    for path in unknown:
        _delete_path(values, path)
    names = ", ".join(".".join(str(key) for key in path) for path in unknown)
    return RunResult.model_validate(values), clean_text(
        f"result.json: unknown to this version and not shown: {names}", 300
    )


def _has_huge_number(value: Any) -> bool:
    match value:
        case dict():
            return any(map(_has_huge_number, value.values()))
        case list():
            return any(map(_has_huge_number, value))
        case int() | float():
            return MAX_MAGNITUDE <= abs(value) < inf
        case _:
            return False


def _delete_path(values: Any, path: tuple[int | str, ...]) -> None:
    *parents, last = path
    for key in parents:
        values = values[key]
    del values[last]
