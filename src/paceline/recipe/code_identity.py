"""Which code a run's own parts are, as far as a file can say: what they import beside it is not counted."""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from paceline.core.files import read_bytes
from paceline.recipe.own import plugins_of
from paceline.recipe.schema import Recipe


def code_identity(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Return `file`, `sha256` and `package` of each part that `recipe` names by path, as far as they can be known.

    A part from a notebook has no file, and `package` is of what is installed under the module's own name. Parts are
    imported. Raise `RecipeError` for one that cannot be used.
    """
    return {part.name: _identify(part.load()) for part in plugins_of(recipe)}


def changed_code(before: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> list[str]:
    """Return the parts whose file is another now than it was `before`, in order."""
    both = ((name, before.get(name, {}).get("sha256"), each.get("sha256")) for name, each in now.items())
    return [name for name, old, new in both if None not in (old, new) and old != new]


def stale_code(recorded: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the parts whose file is gone or another by now, or whose package has another version; import none.

    `recorded` is what `code_identity` said then.
    """
    return [name for name, each in recorded.items() if any(_is_stale(each))]


def _is_stale(each: Mapping[str, str]) -> Iterator[bool]:
    if "file" in each:
        try:
            yield hashlib.sha256(read_bytes(Path(each["file"]))).hexdigest() != each.get("sha256")
        except OSError:
            yield True
    if "package" in each:
        try:
            top = each["package"].partition(" ")[0]
            yield f"{top} {version(top)}" != each["package"]
        except (PackageNotFoundError, ValueError):
            yield True


def _identify(maker: Callable[..., Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        file = Path(inspect.getsourcefile(maker) or "")
        found = {"file": str(file), "sha256": hashlib.sha256(read_bytes(file)).hexdigest()}
    except (OSError, TypeError):  # it is in no file, or of C
        pass
    top = str(getattr(maker, "__module__", "")).partition(".")[0]
    try:
        return {**found, "package": f"{top} {version(top)}"}
    except (PackageNotFoundError, ValueError):
        return found
