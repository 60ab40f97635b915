"""Quote text for a job script: shell words, `#SBATCH` values and comments.

Unprintable characters such as newlines are escaped if the reader can undo that, and refused otherwise.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Final

from paceline.core.errors import RecipeError

_LINE_WIDTH: Final = 100
_UNQUOTED: Final = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def shell_word(text: str) -> str:
    r"""Return `text` as one bash word on one line; unprintable characters become `$'\x0a'`."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_ansi_c_escape, text)) + "'"


def shell_command(groups: Iterable[Sequence[str]]) -> str:
    """Return quoted words as one command, with line breaks between groups only."""
    lines: list[str] = []
    for group in map(" ".join, groups):
        if lines and len(lines[-1]) + 1 + len(group) <= _LINE_WIDTH:
            lines[-1] += f" {group}"
        else:
            lines.append(group)
    return " \\\n    ".join(lines)


def directive(name: str, value: str) -> str:
    """Return `#SBATCH --name=value`, quoted for sbatch.

    sbatch undoes quotes and backslashes, but reads no shell syntax (https://slurm.schedmd.com/sbatch.html). Raise
    `RecipeError` for unprintable characters.
    """
    if not value.isprintable():
        raise RecipeError(f"--{name}: {value!r} has a character that an #SBATCH line cannot hold (name another)")
    if _UNQUOTED.fullmatch(value):
        return f"#SBATCH --{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH --{name}="{escaped}"'


def comment(text: str) -> str:
    """Return `text` as a comment line, with unprintable characters escaped as in Python."""
    return "# " + "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _ansi_c_escape(character: str) -> str:
    """Return a character escaped for `$'...'`; undecodable bytes of file names are preserved."""
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))
