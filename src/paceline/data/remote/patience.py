"""Retry temporary errors with exponential backoff."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.errors import DataError
from paceline.core.units import count
from paceline.data.remote.address import RemoteUrl
from paceline.data.remote.transport import ByteRange, PermanentError, TransientError, Transport


def sleep(seconds: float) -> None:
    """Sleep for `seconds`."""
    threading.Event().wait(seconds)


@dataclass(frozen=True)
class RetryPolicy:
    """Number of attempts, and pauses between them: `first_pause_s`, doubled each time.

    The defaults wait 15.5 s in total, enough for a server restart. A server can request a pause of up to
    `longest_pause_s`.
    """

    attempts: int = 6
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    pause: Callable[[float], None] = sleep

    def read(self, transport: Transport, address: RemoteUrl, start: int, stop: int) -> ByteRange:
        """Return bytes [start, stop) of a file, fewer only at its end. Raise `DataError` naming the URL."""
        pause_s = self.first_pause_s
        for attempt in range(1, self.attempts + 1):
            try:
                return transport.read(address, start, stop)
            except PermanentError as error:
                raise DataError(f"{address.display_url}: {error} ({error.fix})") from error
            except TransientError as error:
                if attempt == self.attempts:
                    raise DataError(
                        f"{address.display_url}: cannot be read: {error}, {count(attempt, 'time')} (check the server "
                        f"and the network, then resume the run with --resume)"
                    ) from error
                self.pause(min(max(pause_s, error.retry_after_s), self.longest_pause_s))
                pause_s *= 2
        raise AssertionError("no attempt is made")
