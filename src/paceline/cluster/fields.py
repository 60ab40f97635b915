"""Field types that all site sections share."""

import re


def as_text(value: object) -> object:
    """Convert a number or bool to text, such as an account or label that YAML parsed as a number."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def check_variable_name(name: str) -> str:
    """Return the name of an environment variable. Raise `ValueError` if it is invalid."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{name!r} is not a variable's name (write letters, digits and _)")
    return name
