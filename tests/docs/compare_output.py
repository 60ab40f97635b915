"""Compare the output shown on a page with the output of a program, ignoring numbers and widths of columns.

In a page's output, a number matches any number, except in a name such as `top-1`. `…` matches anything within a line,
or whole lines. Any run of blanks or of table lines matches another, because the width of a column depends on its
numbers.
"""

import re
from collections.abc import Sequence

_NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
_PARTS = re.compile(rf"(?P<any>…)|(?<![\w-])(?P<number>{_NUMBER})|(?P<run>[ ─━]+)")


def missing_line(shown: str, printed: str) -> str | None:
    """Return the first line of `shown` that is missing in `printed` after the lines before it; None if none is."""
    lines = [line.rstrip() for line in printed.splitlines()]
    place = 0
    for line in shown.splitlines():
        if not line.strip() or line.strip() == "…":
            continue
        found = _first(re.compile(_pattern(line.rstrip())), lines, place)
        if found is None:
            return line
        place = found + 1
    return None


def _first(pattern: re.Pattern[str], lines: Sequence[str], start: int) -> int | None:
    return next((place for place in range(start, len(lines)) if pattern.fullmatch(lines[place])), None)


def _pattern(line: str) -> str:
    parts, place = [], 0
    for found in _PARTS.finditer(line):
        parts.append(re.escape(line[place : found.start()]))
        match found.lastgroup:
            case "any":
                parts.append(r".*")
            case "number":
                parts.append(_NUMBER)
            case _:
                parts.append(r"[ ─━]+")
        place = found.end()
    return "".join([*parts, re.escape(line[place:])])
