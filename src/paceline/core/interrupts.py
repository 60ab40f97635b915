"""Record stop signals: saving needs collectives, so the run stops after the current step, not in a handler."""

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Final, Self

from paceline.core.process import STOP_SIGNALS

_STDERR: Final = 2


class Interrupts:
    """Record stop signals in this context, which may be nested; a second SIGINT raises `KeyboardInterrupt`.

    Signals ignored from the start, such as SIGHUP under `nohup`, stay ignored. Outside of the main thread only
    `request` works. With `announces`, the first signal prints a line to stderr.
    """

    def __init__(self, *, announces: bool = False) -> None:
        self._announces = announces
        self._requested = ""
        self._has_interrupted = False
        self._before: list[tuple[signal.Signals, signal._HANDLER]] = []
        self._depth = 0

    @property
    def requested(self) -> str:
        """Name of the first signal or `request`, or an empty string."""
        return self._requested

    def request(self, name: str) -> None:
        """Request a stop like signal `name`, from any thread. The first request wins."""
        self._requested = self._requested or name

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth > 1 or threading.current_thread() is not threading.main_thread():
            return self
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            # None: installed by non-Python code, and cannot be restored.
            if handler is not None and handler != signal.SIG_IGN:
                signal.signal(number, self._note)
                self._before.append((number, handler))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        while self._before and not self._depth:
            number, handler = self._before.pop()
            if signal.getsignal(number) == self._note:  # unless it was set to ignored meanwhile
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._has_interrupted:
                raise KeyboardInterrupt
            self._has_interrupted = True
        if self._announces and not self._requested:
            _print_stopping(signal.Signals(number).name)
        self.request(signal.Signals(number).name)


def _print_stopping(name: str) -> None:
    # `os.write`: the signal may have interrupted a buffered write.
    line = f"stopping after this step ({name}): the run is being saved\n"
    with contextlib.suppress(OSError):
        os.write(_STDERR, (f"\n{line}" if os.isatty(_STDERR) else line).encode())  # below a progress bar
