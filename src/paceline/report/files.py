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
from paceline.report.words import clean_text

MAX_FILE_BYTES = 8 << 20
MAX_RECORDS = 2_000_000
_MAX_LINE_BYTES = 1 << 20
_HEAD_BYTES = 64 << 10
_MAX_MEAN_RECORD_BYTES = 2 << 10


def is_experiment_dir(path: Path) -> bool:
    """Return whether a folder is an experiment, finished or not, and not a run directory."""
    folder = ExperimentDir(path)
    return folder.result.is_file() or folder.trials.is_dir()


class TolerantReader:
    """Read the files of a run directory and collect problems, one line each, in `problems`."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def read_text(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> str:
        """Return a text file, cut to `max_bytes`; "" if it is missing."""
        data = self.read_bytes(path, max_bytes + 1)
        if len(data) > max_bytes:
            self._add_problem(path, f"only its first {max_bytes:,} bytes are shown")
        return data[:max_bytes].decode("utf-8", "replace")

    def read_bytes(self, path: Path, max_bytes: int, *, follows_links: bool = True) -> bytes:
        """Return the first `max_bytes` of a regular file; nothing if it is missing."""
        try:
            if not path.is_file() or (path.is_symlink() and not follows_links):
                return b""
            with open_to_read(path) as file:
                return file.read(max_bytes)
        except OSError as error:
            self._add_problem(path, f"cannot be read: {error.strerror}")
            return b""

    def read_json(self, path: Path) -> Any:
        """Return the value in a JSON file; None if it is missing or invalid."""
        text = self.read_text(path)
        if not text.strip():
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            self._add_problem(path, f"is not valid JSON: {error}")
            return None

    def read_object(self, path: Path) -> dict[str, Any]:
        """Return the object in a JSON file; an empty one if it is missing or invalid."""
        value = self.read_json(path)
        if value is None or isinstance(value, dict):
            return value or {}
        self._add_problem(path, "is not a JSON object")
        return {}

    def read_sample(self, path: Path, max_records: int) -> tuple[Iterator[dict[str, Any]], bool]:
        """Return the records of a JSON Lines file, and whether they are a sample.

        Of a file with more than about twice `max_records` records, return at most that many, spread evenly and
        including the first and the last, so that reading takes bounded time.
        """
        head = self.read_bytes(path, _HEAD_BYTES)
        num_lines = head.count(b"\n")
        is_long = False
        if num_lines and len(head) == _HEAD_BYTES:
            num_bytes = path.stat().st_size
            mean_bytes = min(_MAX_MEAN_RECORD_BYTES, (head.rindex(b"\n") + 1) / num_lines)
            # In a shorter file, neighbouring positions would fall into the same line.
            is_long = num_bytes > 2 * max_records * mean_bytes
        return self._parse_lines(
            path, self._read_spread_lines(path, max_records) if is_long else self._read_lines(path)
        ), is_long

    def read_records(self, path: Path, max_records: int = MAX_RECORDS) -> Iterator[dict[str, Any]]:
        """Yield the records of a JSON Lines file; count and skip invalid lines."""
        lines = self._read_lines(path)
        yield from self._parse_lines(path, islice(lines, max_records))
        if next(lines, None) is not None:
            self._add_problem(path, f"only its first {max_records:,} lines are read")

    def _parse_lines(self, path: Path, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        damaged = 0
        for line in lines:
            record = _parse_record(line)
            if record is None:
                damaged += 1
            else:
                yield record
        if damaged:
            self._add_problem(path, f"{damaged:,} lines are not records and were skipped")

    def _read_lines(self, path: Path) -> Iterator[bytes]:
        # A last line without newline was cut off.
        try:
            if not path.is_file():
                return
            with open_to_read(path) as file:
                while line := file.readline(_MAX_LINE_BYTES):
                    if line.endswith(b"\n"):
                        yield line
                    elif len(line) == _MAX_LINE_BYTES:
                        yield b"too long"  # not JSON, so it counts as damaged
                        while (rest := file.readline(_MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                            pass
        except OSError as error:
            self._add_problem(path, f"cannot be read: {error.strerror}")

    def _read_spread_lines(self, path: Path, number: int) -> Iterator[bytes]:
        try:
            with open_to_read(path) as file:
                num_bytes = file.seek(0, os.SEEK_END)
                end = 0  # of the bytes read so far
                for index in range(number - 1):
                    begin = index * num_bytes // (number - 1)
                    if begin < end:
                        continue
                    if _seek_line_start(file, begin):
                        line = file.readline(_MAX_LINE_BYTES)
                        if line.endswith(b"\n"):
                            yield line
                    end = file.tell()
                yield from _read_last_line(file, end, num_bytes)
        except OSError as error:
            self._add_problem(path, f"cannot be read: {error.strerror}")

    def _add_problem(self, path: Path, what: str) -> None:
        self.problems.append(clean_text(f"{path.name}: {what}", 300))


def find_setting(recipe: str, section: str, field: str) -> str:
    """Return a field of a section of a resolved recipe as text, "" if it is absent."""
    match = re.search(rf"^{section}:\n((?:[ ].*\n|\n)*)", recipe + "\n", re.MULTILINE)
    value = re.search(rf"^[ ]+{field}:[ ]*(.*)$", match[1], re.MULTILINE) if match else None
    return value[1].strip() if value else ""


def _seek_line_start(file: BinaryIO, begin: int) -> bool:
    """Seek to the first line at or after `begin`; return whether there is one within a line's length."""
    file.seek(max(0, begin - 1))
    return begin == 0 or file.readline(_MAX_LINE_BYTES).endswith(b"\n")


def _read_last_line(file: BinaryIO, end: int, num_bytes: int) -> Iterator[bytes]:
    begin = max(end, num_bytes - _MAX_LINE_BYTES)
    file.seek(begin)
    whole, newline, _ = file.read(num_bytes - begin).rpartition(b"\n")
    _, before_newline, line = whole.rpartition(b"\n")
    if newline and (before_newline or begin == end):
        yield line + newline


def _parse_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
