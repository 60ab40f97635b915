"""Write a tuned recipe: it extends the original, with a comment on the gain of each setting."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError
from paceline.core.rundir import write_atomic
from paceline.recipe.load import PRESETS, find_recipe
from paceline.recipe.patch import Patch


def format_tuned_recipe(name: str, patch: Patch, comments: Mapping[str, str], header: str) -> str:
    """Return a recipe file: `patch` over the recipe `name`, with a comment at each dotted path in `comments`."""
    lines = [f"# {header}", f"extends: {json.dumps(_resolve_base(name), ensure_ascii=False)}"]
    return "\n".join([*lines, *_format_lines(patch.values(), comments, "", 0)]) + "\n"


def write_tuned_recipe(path: Path, text: str) -> None:
    """Write the file. Raise `PacelineError` if it cannot be written."""
    try:
        write_atomic(path, text)
    except OSError as error:
        raise PacelineError(f"{path}: cannot be written: {error.strerror} (free some room)") from None


def _resolve_base(name: str) -> str:
    """Return a value for `extends` that stays valid if the file is moved: a preset's name, or an absolute path."""
    path = find_recipe(name)
    return name if path.is_relative_to(PRESETS) else str(path.resolve())


def _format_lines(values: Mapping[str, Any], comments: Mapping[str, str], above: str, depth: int) -> Iterator[str]:
    for key, value in values.items():
        path, indent = f"{above}{key}", "  " * depth
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from _format_lines(value, comments, f"{path}.", depth + 1)
            continue
        comment = f"  # {comments[path]}" if path in comments else ""
        yield f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}{comment}"  # JSON is YAML too
