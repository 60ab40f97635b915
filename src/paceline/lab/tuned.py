"""Write a tuned recipe: it extends the one it came from, and says at each setting what that has won."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError
from paceline.core.rundir import write_atomic
from paceline.recipe.load import PRESETS, find
from paceline.recipe.patch import Patch


def tuned_text(name: str, patch: Patch, comments: Mapping[str, str], header: str) -> str:
    """Return a recipe file: `patch` over the recipe `name`, with a comment at each dotted path that has one."""
    lines = [f"# {header}", f"extends: {json.dumps(_base(name), ensure_ascii=False)}"]
    return "\n".join([*lines, *_lines(patch.values(), comments, "", 0)]) + "\n"


def write_tuned(path: Path, text: str) -> None:
    """Write it. Raise `PacelineError` when it cannot be."""
    try:
        write_atomic(path, text)
    except OSError as error:
        raise PacelineError(f"{path}: cannot be written: {error.strerror} (free some room)") from None


def _base(name: str) -> str:
    """Return what `extends` finds wherever the file is moved to: a preset's name, or a whole path."""
    path = find(name)
    return name if path.is_relative_to(PRESETS) else str(path.resolve())


def _lines(values: Mapping[str, Any], comments: Mapping[str, str], above: str, depth: int) -> Iterator[str]:
    for key, value in values.items():
        path, indent = f"{above}{key}", "  " * depth
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from _lines(value, comments, f"{path}.", depth + 1)
            continue
        comment = f"  # {comments[path]}" if path in comments else ""
        yield f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}{comment}"  # JSON is YAML too
