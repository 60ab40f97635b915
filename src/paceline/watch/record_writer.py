"""Write the records of this process, which `paceline watch` reads while it runs. Torch-free."""

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, BinaryIO, Final, final

FLUSH_S: Final = 0.5
Record = dict[str, Any]


@final
class Flag:
    """An empty file by which any process of the script, such as a loader worker, tells the others of an event."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def is_set(self) -> bool:
        """Whether a process has set it."""
        return self._path.exists()

    def set(self) -> None:
        """Set it, unless the disk is full."""
        with contextlib.suppress(OSError):
            self._path.touch()


@final
class RecordWriter:
    """Write JSON lines to `HOST-PID.jsonl`, from the first `flush` on, and then whenever half a second has passed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: list[Record] = []
        self._file: BinaryIO | None = None
        self._flushed_s = 0.0

    def add(self, record: Record) -> None:
        """Keep `record` for the next flush."""
        self._lines.append(record)

    @property
    def is_due(self) -> bool:
        """Whether the last flush is half a second ago."""
        return time.perf_counter() - self._flushed_s > FLUSH_S

    def flush(self) -> None:
        """Write all records so far. Raise OSError if that fails."""
        if self._file is None:
            name = f"{socket.gethostname()}-{os.getpid()}.jsonl"
            # Without a buffer, which a full disk would leave filled, and a forked child would write again.
            self._file = (self._folder / name).open("ab", buffering=0)
        lines, self._lines = self._lines, []
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        while content:
            content = content[self._file.write(content) :]
        self._flushed_s = time.perf_counter()
