"""How bytes of a remote file are had, once: `Transport`; and what can be wrong, for now or for good."""

from dataclasses import dataclass
from typing import Protocol

from paceline.data.remote.address import Address


@dataclass(frozen=True)
class Piece:
    """Bytes of a file, and how many it has in all."""

    data: bytes
    total: int


class PassingError(Exception):
    """Something that may be better when tried again; `pause_s` is how long the server asks to wait."""

    def __init__(self, reason: str, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


class LastingError(Exception):
    """Something that will be the same when tried again, and what to do about it."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.fix = fix


class Transport(Protocol):
    """Reads ranges of files. Threads may share it; a forked process must have one of its own."""

    def read(self, address: Address, start: int, stop: int) -> Piece:
        """Return bytes [start, stop) of a file, fewer only where it ends before `stop`; never others.

        Raise `PassingError` or `LastingError`.
        """
        ...

    def close(self) -> None:
        """Give back connections."""
        ...
