"""What the fields of all sites have in common: numbers that are text, and names of variables."""

import re


def as_text(value: object) -> object:
    """Take a number or a switch for the text that it is written as, such as an account's, a variable's or a label's."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def variable_name(name: str) -> str:
    """Return the name of an environment variable. Raise `ValueError` for what is none."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{name!r} is not a variable's name (write letters, digits and _)")
    return name
