"""JSON-lines files that a resumed run continues. Each record is flushed at once."""

import json
from pathlib import Path
from typing import IO, Any

from paceline.core.files import open_text_to_write
from paceline.core.rundir import read_lines, write_atomic


def open_from_step(path: Path, last_step: int) -> IO[str]:
    """Open a JSON-lines file for appending, after dropping the records past `last_step`."""
    drop_records_after(path, last_step)
    return open_text_to_write(path, "a")


def drop_records_after(path: Path, last_step: int) -> None:
    """Drop the records after `last_step` from a JSON-lines file, which is created if it is missing."""
    kept = [record for record in read_lines(path, of_steps=True) if record["step"] <= last_step]
    write_atomic(path, "".join(json.dumps(record) + "\n" for record in kept))


def append_record(file: IO[str], record: dict[str, Any]) -> None:
    """Append `record` and flush."""
    file.write(json.dumps(record) + "\n")
    file.flush()
