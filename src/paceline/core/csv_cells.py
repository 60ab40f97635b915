"""Escape text for CSV cells, so that no spreadsheet runs it as a formula and no terminal obeys control characters.

An escaped cell begins with an apostrophe, and has Python's escapes for backslashes and unprintable characters: `\n`,
`\x1b`, `\u202e`, and `\udcff` for a byte of a file name that is not UTF-8. Any other cell is the text itself.
"""

import re
import unicodedata
from typing import Final

_MARK: Final = "'"
_FORMULA: Final = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", _MARK)
"""First characters of a formula in spreadsheets (https://owasp.org/www-community/attacks/CSV_Injection)."""
_NUMBER: Final = re.compile(r"[+-]?\d+(\.\d+)?")
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|([\\nrt]))")
_SHORT: Final = {"\\": "\\", "n": "\n", "r": "\r", "t": "\t"}


def to_cell(text: str) -> str:
    """Escape `text` for a CSV cell."""
    # Numbers such as -1.5 are no formulas and stay readable.
    if all(map(_is_plain, text)) and (not text.startswith(_FORMULA) or _NUMBER.fullmatch(text)):
        return text
    return _MARK + "".join(_escape(character) for character in text)


def from_cell(cell: str) -> str:
    """Return the text that `to_cell` escaped."""
    if not cell.startswith(_MARK):
        return cell
    return _ESCAPE.sub(
        lambda found: _SHORT[found[4]] if found[4] else chr(int(found[1] or found[2] or found[3], 16)), cell[1:]
    )


def _is_plain(character: str) -> bool:
    # `isprintable` is False for all spaces but " ", such as the narrow one in the names of macOS screenshots.
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _escape(character: str) -> str:
    if character == "\\" or not _is_plain(character):
        return character.encode("unicode_escape").decode("ascii")
    return character
