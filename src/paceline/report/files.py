"""Read files that may be missing, truncated, damaged, huge or foreign, and record every problem."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from paceline.core.experiments.folder import ExperimentDir
from paceline.core.files import open_to_read
from paceline.report.words import clean

MAX_BYTES = 8 << 20
MAX_RECORDS = 2_000_000
_MAX_LINE = 1 << 20
_BEGINNING = 64 << 10
_LONG_RECORD = 2 << 10


def is_experiment(path: Path) -> bool:
    """Return whether a folder is an experiment, finished or not, and not a run directory."""
    folder = ExperimentDir(path)
    return folder.result.is_file() or folder.trials.is_dir()


class Reader:
    """Read the files of a run directory and collect problems, one line each, in `problems`."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def text(self, path: Path, max_bytes: int = MAX_BYTES) -> str:
        """Return a text file, cut to `max_bytes`; "" if it is missing."""
        data = self.data(path, max_bytes + 1)
        if len(data) > max_bytes:
            self._note(path, f"only its first {max_bytes:,} bytes are shown")
        return data[:max_bytes].decode("utf-8", "replace")

    def data(self, path: Path, max_bytes: int, *, follows_links: bool = True) -> bytes:
        """Return the first `max_bytes` of a regular file; nothing if it is missing."""
        try:
            if not path.is_file() or (path.is_symlink() and not follows_links):
                return b""
            with open_to_read(path) as file:
                return file.read(max_bytes)
        except OSError as error:
            self._note(path, f"cannot be read: {error.strerror}")
            return b""

    def json(self, path: Path) -> Any:
        """Return the value in a JSON file; None if it is missing or invalid."""
        text = self.text(path)
        if not text.strip():
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            self._note(path, f"is not valid JSON: {error}")
            return None

    def object(self, path: Path) -> dict[str, Any]:
        """Return the object in a JSON file; an empty one if it is missing or invalid."""
        value = self.json(path)
        if value is None or isinstance(value, dict):
            return value or {}
        self._note(path, "is not a JSON object")
        return {}

    def sample(self, path: Path, max_records: int) -> tuple[Iterator[dict[str, Any]], bool]:
        """Return the records of a JSON Lines file, and whether they are a sample.

        Of a file with more than about twice `max_records` records, return at most that many, spread evenly and
        including the first and the last, so that reading takes bounded time.
        """
        head = self.data(path, _BEGINNING)
        num_lines = head.count(b"\n")
        is_long = False
        if num_lines and len(head) == _BEGINNING:
            num_bytes = path.stat().st_size
            mean_bytes = min(_LONG_RECORD, (head.rindex(b"\n") + 1) / num_lines)
            # In a shorter file, neighbouring positions would fall into the same line.
            is_long = num_bytes > 2 * max_records * mean_bytes
        return self._parsed(path, self._spread(path, max_records) if is_long else self._lines(path)), is_long

    def records(self, path: Path, max_records: int = MAX_RECORDS) -> Iterator[dict[str, Any]]:
        """Yield the records of a JSON Lines file; count and skip invalid lines."""
        lines = self._lines(path)
        yield from self._parsed(path, islice(lines, max_records))
        if next(lines, None) is not None:
            self._note(path, f"only its first {max_records:,} lines are read")

    def _parsed(self, path: Path, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        damaged = 0
        for line in lines:
            record = _record(line)
            if record is None:
                damaged += 1
            else:
                yield record
        if damaged:
            self._note(path, f"{damaged:,} lines are not records and were skipped")

    def _lines(self, path: Path) -> Iterator[bytes]:
        # A last line without newline was cut off.
        try:
            if not path.is_file():
                return
            with open_to_read(path) as file:
                while line := file.readline(_MAX_LINE):
                    if line.endswith(b"\n"):
                        yield line
                    elif len(line) == _MAX_LINE:
                        yield b"too long"  # not JSON, so it counts as damaged
                        while (rest := file.readline(_MAX_LINE)) and not rest.endswith(b"\n"):
                            pass
        except OSError as error:
            self._note(path, f"cannot be read: {error.strerror}")

    def _spread(self, path: Path, number: int) -> Iterator[bytes]:
        try:
            with open_to_read(path) as file:
                num_bytes = file.seek(0, os.SEEK_END)
                end = 0  # of the bytes read so far
                for index in range(number - 1):
                    begin = index * num_bytes // (number - 1)
                    if begin < end:
                        continue
                    if _skip_to_line(file, begin):
                        line = file.readline(_MAX_LINE)
                        if line.endswith(b"\n"):
                            yield line
                    end = file.tell()
                yield from _last_line(file, end, num_bytes)
        except OSError as error:
            self._note(path, f"cannot be read: {error.strerror}")

    def _note(self, path: Path, what: str) -> None:
        self.problems.append(clean(f"{path.name}: {what}", 300))


def setting(recipe: str, section: str, field: str) -> str:
    """Return a field of a section of a resolved recipe as text, "" if it is absent."""
    match = re.search(rf"^{section}:\n((?:[ ].*\n|\n)*)", recipe + "\n", re.MULTILINE)
    value = re.search(rf"^[ ]+{field}:[ ]*(.*)$", match[1], re.MULTILINE) if match else None
    return value[1].strip() if value else ""


def _skip_to_line(file: BinaryIO, begin: int) -> bool:
    """Seek to the first line at or after `begin`; return whether there is one within a line's length."""
    file.seek(max(0, begin - 1))
    return begin == 0 or file.readline(_MAX_LINE).endswith(b"\n")


def _last_line(file: BinaryIO, end: int, num_bytes: int) -> Iterator[bytes]:
    begin = max(end, num_bytes - _MAX_LINE)
    file.seek(begin)
    whole, newline, _ = file.read(num_bytes - begin).rpartition(b"\n")
    _, before_newline, line = whole.rpartition(b"\n")
    if newline and (before_newline or begin == end):
        yield line + newline


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
