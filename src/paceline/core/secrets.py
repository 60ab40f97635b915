"""Recognize names of secrets, and keep their values out of files. Torch-free."""

import re
from collections.abc import Sequence
from typing import Final

MASK: Final = "***"
"""Text in the place of a value that may be a secret."""
_SECRET: Final = re.compile(
    r"(?i)secret|passw|credential|api[-_.]?key|token$|(^|[-_.])(key|token|auth)($|[-_.])"
)  # not --tokenizer, --keys


def is_secret_name(name: str) -> bool:
    """Return whether the value of an option or variable of this name is probably a secret."""
    return _SECRET.search(name) is not None


def mask_secrets(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command with `***` for secret values of `--NAME VALUE`, `--NAME=VALUE` and `NAME=VALUE`."""
    masked = []
    is_value = False
    for word in command:
        name, has_value, _ = word.partition("=")
        is_named = is_secret_name(name.lstrip("-"))
        if is_value and not word.startswith("--"):
            masked.append(MASK)
        else:
            masked.append(f"{name}={MASK}" if has_value and is_named else word)
        is_value = is_named and word.startswith("-") and not has_value
    return tuple(masked)
