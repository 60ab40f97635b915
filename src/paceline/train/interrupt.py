"""Signals that ask a run to stop: noted when they come, acted upon where a step ends.

A handler runs between any two lines of the program, and saving takes collectives, so handlers do nothing but take
note. A rank inside a collective runs no handler until it is out of it; what ends one that never is, is its launcher.
"""

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Final, Self

from paceline.core.process import STOP_SIGNALS

_STDERR: Final = 2


class Interrupts:
    """Note the signals that come while this context lasts; before and after it they do what they did.

    A signal that was ignored when the process started, as SIGHUP is under `nohup`, stays ignored. A second SIGINT
    raises `KeyboardInterrupt`, for someone who will not wait. Outside the main thread, which alone may handle
    signals, nothing is noted but by `request`. Entered again inside, it stays as it is until the outer one ends.

    With `announces` the first signal is answered by a line on stderr, as the step that runs may take a while.
    """

    def __init__(self, *, announces: bool = False) -> None:
        self._announces = announces
        self._requested = ""
        self._has_interrupted = False
        self._before: list[tuple[signal.Signals, signal._HANDLER]] = []
        self._depth = 0

    @property
    def requested(self) -> str:
        """The name of the first signal that came, or of the first `request`; empty when there was none."""
        return self._requested

    def request(self, name: str) -> None:
        """Ask to stop as signal `name` does, from any thread; what came first stays."""
        self._requested = self._requested or name

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth > 1 or threading.current_thread() is not threading.main_thread():
            return self
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            # None: installed by a library of another language, which could not be put back.
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
            if signal.getsignal(number) == self._note:  # not where it is ignored from now on
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._has_interrupted:
                raise KeyboardInterrupt
            self._has_interrupted = True
        if self._announces and not self._requested:
            _announce(signal.Signals(number).name)
        self.request(signal.Signals(number).name)


def _announce(name: str) -> None:
    """Write the line past all buffers: the program may be in the middle of writing to them."""
    line = f"stopping after this step ({name}): the run is being saved\n"
    with contextlib.suppress(OSError):
        os.write(_STDERR, (f"\n{line}" if os.isatty(_STDERR) else line).encode())  # below a bar that is being drawn
