"""Put any text into a job script so that it stays text: as a word of bash's, as a value of `#SBATCH`, as a comment.

What a line cannot hold, such as a newline, is escaped where the reader undoes that, and refused where none does.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Final

from paceline.core.errors import RecipeError

_WIDTH: Final = 100
_PLAIN: Final = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def shell_word(text: str) -> str:
    """Return `text` as one word of bash's, on one line: what cannot be printed is written as `$'\\x0a'`."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_ansi_c, text)) + "'"


def shell_command(groups: Iterable[Sequence[str]]) -> str:
    """Return words that are quoted already as one command, continued over lines that break between groups of them."""
    lines: list[str] = []
    for group in map(" ".join, groups):
        if lines and len(lines[-1]) + 1 + len(group) <= _WIDTH:
            lines[-1] += f" {group}"
        else:
            lines.append(group)
    return " \\\n    ".join(lines)


def directive(name: str, value: str) -> str:
    """Return `#SBATCH --name=value`; sbatch itself undoes the quotes, and a backslash within them.

    It reads no shell syntax (https://slurm.schedmd.com/sbatch.html), and a newline ends the value. Raise `RecipeError`
    for what cannot be printed.
    """
    if not value.isprintable():
        raise RecipeError(f"--{name}: {value!r} has a character that an #SBATCH line cannot hold (name another)")
    if _PLAIN.fullmatch(value):
        return f"#SBATCH --{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH --{name}="{escaped}"'


def comment(text: str) -> str:
    """Return `text` as a line of comment; what cannot be printed is shown as Python writes it."""
    return "# " + "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _ansi_c(character: str) -> str:
    """Return a character as it stands between `$'` and `'`; bytes of a file's name that are no UTF-8 stay those."""
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))
