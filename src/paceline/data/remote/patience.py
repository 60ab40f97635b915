"""Retry temporary errors with exponential backoff."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.errors import DataError
from paceline.core.units import count
from paceline.data.remote.address import Address
from paceline.data.remote.transport import LastingError, PassingError, Piece, Transport


def wait_s(seconds: float) -> None:
    """Sleep for `seconds`."""
    threading.Event().wait(seconds)


@dataclass(frozen=True)
class Patience:
    """Number of attempts, and pauses between them: `first_pause_s`, doubled each time.

    The defaults wait 15.5 s in total, enough for a server restart. A server can request a pause of up to
    `longest_pause_s`.
    """

    attempts: int = 6
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    pause: Callable[[float], None] = wait_s

    def read(self, transport: Transport, address: Address, start: int, stop: int) -> Piece:
        """Return bytes [start, stop) of a file, fewer only at its end. Raise `DataError` naming the URL."""
        pause_s = self.first_pause_s
        for attempt in range(1, self.attempts + 1):
            try:
                return transport.read(address, start, stop)
            except LastingError as error:
                raise DataError(f"{address.shown}: {error} ({error.fix})") from error
            except PassingError as error:
                if attempt == self.attempts:
                    raise DataError(
                        f"{address.shown}: cannot be read: {error}, {count(attempt, 'time')} (check the server "
                        f"and the network, then resume the run with --resume)"
                    ) from error
                self.pause(min(max(pause_s, error.pause_s), self.longest_pause_s))
                pause_s *= 2
        raise AssertionError("no attempt is made")
