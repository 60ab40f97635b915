"""Files that may be missing, cut off, damaged, enormous or somebody else's: read what is there, and note the rest."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.report.words import clean

MAX_BYTES = 8 << 20
MAX_RECORDS = 2_000_000
_MAX_LINE = 1 << 20


class Reader:
    """Read files of a run directory; what is wrong with them is in `problems`, a line each."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def text(self, path: Path, max_bytes: int = MAX_BYTES) -> str:
        """Return a text file, its beginning where it has more than `max_bytes`, and "" where there is none."""
        data = self.data(path, max_bytes + 1)
        if len(data) > max_bytes:
            self._note(path, f"only its first {max_bytes:,} bytes are shown")
        return data[:max_bytes].decode("utf-8", "replace")

    def data(self, path: Path, max_bytes: int, *, follows_links: bool = True) -> bytes:
        """Return the first `max_bytes` of a regular file, nothing where there is none."""
        try:
            if not path.is_file() or (path.is_symlink() and not follows_links):
                return b""
            with path.open("rb") as file:
                return file.read(max_bytes)
        except OSError as error:
            self._note(path, f"cannot be read: {error.strerror}")
            return b""

    def json(self, path: Path) -> Any:
        """Return the value in a JSON file, None where there is none."""
        text = self.text(path)
        if not text.strip():
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            self._note(path, f"is no JSON: {error}")
            return None

    def object(self, path: Path) -> dict[str, Any]:
        """Return the object in a JSON file, an empty one where there is none."""
        found = self.json(path)
        if found is None or isinstance(found, dict):
            return found or {}
        self._note(path, "is no JSON object")
        return {}

    def records(self, path: Path, max_records: int = MAX_RECORDS) -> Iterator[dict[str, Any]]:
        """Yield the records of a JSON-lines file; lines that are none are counted and left out."""
        damaged = 0
        for number, line in enumerate(self._lines(path)):
            if number == max_records:
                self._note(path, f"only its first {max_records:,} lines are read")
                break
            record = _record(line)
            if record is None:
                damaged += 1
            else:
                yield record
        if damaged:
            self._note(path, f"{damaged:,} lines are no records, and left out")

    def _lines(self, path: Path) -> Iterator[bytes]:
        """Yield whole lines; a last one without its end was cut off, and is left out."""
        try:
            if not path.is_file():
                return
            with path.open("rb") as file:
                while line := file.readline(_MAX_LINE):
                    if line.endswith(b"\n"):
                        yield line
                    elif len(line) == _MAX_LINE:
                        yield b"too long"
                        while (rest := file.readline(_MAX_LINE)) and not rest.endswith(b"\n"):
                            pass
        except OSError as error:
            self._note(path, f"cannot be read: {error.strerror}")

    def _note(self, path: Path, what: str) -> None:
        self.problems.append(clean(f"{path.name}: {what}", 300))


def setting(recipe: str, section: str, field: str) -> str:
    """Return a field of a resolved recipe's section as it is written there, "" where it is not."""
    match = re.search(rf"^{section}:\n((?:[ ].*\n|\n)*)", recipe + "\n", re.MULTILINE)
    found = re.search(rf"^[ ]+{field}:[ ]*(.*)$", match[1], re.MULTILINE) if match else None
    return found[1].strip() if found else ""


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
