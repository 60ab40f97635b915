"""Which tars a recipe means: a path with ranges of numbers in braces, and with `*`."""

import os
import re
from glob import escape, glob
from itertools import product

from paceline.core.errors import DataError
from paceline.data.sources.places import expanded, printable

_RANGE = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")
_MAX_TARS = 1_000_000


def tar_paths(text: str, setting: str) -> tuple[str, ...]:
    """Return the absolute paths that `text` means. Raise `DataError`, naming `setting`, where one is not there.

    `{000..127}` stands for each of its numbers, in order and padded as the first is; `*` for any characters but a
    slash, in order of the names.
    """
    found: list[str] = []
    for path in _numbered(str(expanded(text).absolute()), setting):
        pattern = "*".join(map(escape, path.split("*")))
        matches = sorted(glob(pattern), key=os.fsencode) if "*" in path else [path]  # noqa: PTH207 - takes it whole
        if not matches or not os.path.lexists(matches[0]):
            raise DataError(f"{setting}: there is no {printable(path)} (correct it, or fetch the tars first)")
        found += matches
    if len(set(found)) < len(found):
        twice = next(path for path in found if found.count(path) > 1)
        raise DataError(f"{setting}: means {printable(twice)} twice (correct it)")
    return tuple(found)


def _numbered(text: str, setting: str) -> list[str]:
    """Return what `text` stands for, a path for each number in each range."""
    parts = _RANGE.split(text)  # text, first, last, text, first, last, text
    ranges = []
    num_paths = 1
    for first, last in zip(parts[1::3], parts[2::3], strict=True):
        if len(last) > 9 or int(first) > int(last):
            raise DataError(f"{setting}: {{{first}..{last}}} is no range of numbers that rises (correct it)")
        numbers = range(int(first), int(last) + 1)
        num_paths *= len(numbers)
        if num_paths > _MAX_TARS:
            raise DataError(f"{setting}: {printable(text)} means more than {_MAX_TARS:,} tars (correct it)")
        ranges.append([str(number).zfill(len(first)) for number in numbers])
    return ["".join(_woven(parts[::3], numbers)) for numbers in product(*ranges)]


def _woven(texts: list[str], numbers: tuple[str, ...]) -> list[str]:
    return [part for pair in zip(texts, (*numbers, ""), strict=True) for part in pair]
