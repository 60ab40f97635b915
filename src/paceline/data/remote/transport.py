"""The `Transport` protocol for byte ranges of remote files, and its temporary and permanent errors."""

from dataclasses import dataclass
from typing import Protocol

from paceline.data.remote.address import RemoteUrl


@dataclass(frozen=True)
class ByteRange:
    """Bytes of a file, and the size of the file."""

    data: bytes
    total: int


class TransientError(Exception):
    """A temporary error; `retry_after_s` is the pause that the server requests before a retry, in seconds."""

    def __init__(self, reason: str, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = pause_s


class PermanentError(Exception):
    """A permanent error, with its fix."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.fix = fix


class Transport(Protocol):
    """Read byte ranges of files. Threads can share it; forked processes cannot."""

    def read(self, address: RemoteUrl, start: int, stop: int) -> ByteRange:
        """Return bytes [start, stop) of a file, fewer only at its end. Raise `TransientError` or `PermanentError`."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...
