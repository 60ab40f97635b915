"""Expand tar paths with number ranges in braces and `*`."""

import os
import re
from glob import escape, glob
from itertools import product

from paceline.core.errors import DataError
from paceline.data.sources.places import expand_path, printable

_NUMBER_RANGE = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")
_MAX_TARS = 1_000_000


def expand_tar_paths(text: str, setting: str) -> tuple[str, ...]:
    """Return the absolute paths that `text` stands for. Raise `DataError`, naming `setting`, if one does not exist.

    `{000..127}` expands to its numbers in order, zero-padded like the first; `*` matches any characters except a slash,
    in order of the names.
    """
    paths: list[str] = []
    for path in _expand_ranges(str(expand_path(text).absolute()), setting):
        pattern = "*".join(map(escape, path.split("*")))
        matches = sorted(glob(pattern), key=os.fsencode) if "*" in path else [path]  # noqa: PTH207 - takes absolute patterns
        if not matches or not os.path.lexists(matches[0]):
            raise DataError(f"{setting}: {printable(path)} does not exist (correct it, or download the tars first)")
        paths += matches
    if len(set(paths)) < len(paths):
        repeated = next(path for path in paths if paths.count(path) > 1)
        raise DataError(f"{setting}: means {printable(repeated)} twice (correct it)")
    return tuple(paths)


def _expand_ranges(text: str, setting: str) -> list[str]:
    parts = _NUMBER_RANGE.split(text)  # text, first, last, text, first, last, text
    ranges = []
    num_paths = 1
    for first, last in zip(parts[1::3], parts[2::3], strict=True):
        if len(last) > 9 or int(first) > int(last):
            raise DataError(f"{setting}: {{{first}..{last}}} is not an increasing range of numbers (correct it)")
        numbers = range(int(first), int(last) + 1)
        num_paths *= len(numbers)
        if num_paths > _MAX_TARS:
            raise DataError(f"{setting}: {printable(text)} means more than {_MAX_TARS:,} tars (correct it)")
        ranges.append([str(number).zfill(len(first)) for number in numbers])
    return ["".join(_interleave(parts[::3], numbers)) for numbers in product(*ranges)]


def _interleave(texts: list[str], numbers: tuple[str, ...]) -> list[str]:
    return [text for pair in zip(texts, (*numbers, ""), strict=True) for text in pair]
