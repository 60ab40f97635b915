"""The console: standard output and error that can be full, closed or gone without ending what prints to them.

Progress is for a reader who may have left: a run goes on without one, and records that it has lost its console.
Output that a verb exists to make, such as JSON, is different: where it cannot be written, the verb has failed.
"""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any, Final, TextIO

_STREAMS: Final = ("stdin", "stdout", "stderr")


class ConsoleLostError(OSError):
    """The output of a verb cannot be written to standard output."""


class _DescriptorFile(io.FileIO):
    """A descriptor of the console. It remembers the first failed write; later ones may succeed."""

    def __init__(self, number: int, name: str, lost: str) -> None:
        super().__init__(number, "w", closefd=False)
        self._name = name
        self._is_closed = bool(lost)
        self._report: Callable[[str], None] = lambda message: None
        self.lost = lost
        self.raises = True

    def write(self, data: Any) -> int:
        """Write `data`; when the console is lost and `raises` is False, drop it."""
        try:
            if self._is_closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            written = super().write(data)
        except OSError as error:
            self._lose(error)
        else:
            if written is not None or self.raises:
                return written
        return len(data)  # also where the descriptor does not block and its reader is slow: progress does not wait

    def report_to(self, report: Callable[[str], None]) -> None:
        """Call `report` once with the loss of the console, now or when it happens."""
        self._report = report
        if self.lost:
            report(self._sentence())

    def _lose(self, error: OSError) -> None:
        is_news, self.lost = not self.lost, self.lost or error.strerror or str(error)
        if isinstance(error, BrokenPipeError) and self.raises:
            raise error
        if self.raises:
            raise ConsoleLostError(error.errno, f"{self._name}: cannot be written: {error.strerror}")
        if is_news:
            self._report(self._sentence())

    def _sentence(self) -> str:
        return f"{self._name}: cannot be written: {self.lost} (the run continues; its files have every record)"


class Console(io.TextIOWrapper):
    """Standard output or error as text. Until `keep_going`, a failed write raises `OSError`.

    `is_product`: the program was started for this output. Characters that the encoding lacks are escaped.
    """

    def __init__(self, number: int, name: str, like: TextIO | None) -> None:
        lost = "it is closed" if like is None else ""
        self._descriptor = _DescriptorFile(os.open(os.devnull, os.O_WRONLY) if lost else number, name, lost)
        errors = getattr(like, "errors", None) or "strict"
        super().__init__(
            io.BufferedWriter(self._descriptor),
            encoding=getattr(like, "encoding", None),
            errors="backslashreplace" if errors == "strict" else errors,
            line_buffering=name == "stderr" or bool(getattr(like, "line_buffering", False)),
            write_through=bool(getattr(like, "write_through", False)),
        )
        self._like = like  # which would close the descriptor with itself
        self.is_product = False

    @property
    def lost(self) -> str:
        """Reason of the first failed write, or ""."""
        return self._descriptor.lost

    def keep_going(self) -> None:
        """From now on drop what cannot be written, without raising."""
        self._descriptor.raises = False

    def report_loss(self, report: Callable[[str], None]) -> None:
        """Call `report` with one line once the console is lost, from the thread that notices."""
        self._descriptor.report_to(report)


def secure_console() -> None:
    """Replace `sys.stdout` and `sys.stderr` by consoles; stderr ignores errors. Call it first.

    Closed descriptors 0 to 2 are opened as the null device: a file or socket with such a number would be mistaken for a
    standard stream, in this process and its children.
    """
    for number in range(len(_STREAMS)):
        _fill(number)
    for number, name in enumerate(_STREAMS):
        stream = getattr(sys, name)
        descriptor = number if stream is None else _descriptor_of(stream)
        if name != "stdin" and descriptor is not None:
            setattr(sys, name, Console(descriptor, name, stream))
    if isinstance(sys.stderr, Console):
        sys.stderr.keep_going()


def progress_console(*, as_json: bool) -> TextIO:
    """Return the stream for the progress of a verb that must outlive its console.

    With `as_json` it is stderr, as stdout receives the result. `lost_output_reason` checks at the end that it did.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Console):
            stream.keep_going()
    if as_json and isinstance(sys.stdout, Console):
        sys.stdout.is_product = True
    return sys.stderr if as_json else sys.stdout


def report_lost_consoles(report: Callable[[str], None]) -> None:
    """Call `report` with one line for each standard stream that is lost, now or later."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Console):
            stream.report_loss(report)


def lost_output_reason() -> str:
    """Flush; return why standard output lacks the result that belongs there, or ""."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    return sys.stdout.lost if isinstance(sys.stdout, Console) and sys.stdout.is_product else ""


def _fill(number: int) -> None:
    """Open the null device as descriptor `number` if it is closed; all lower ones must be open."""
    try:
        os.fstat(number)
    except OSError:
        with contextlib.suppress(OSError):
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _descriptor_of(stream: TextIO) -> int | None:
    """Flush `stream` and return its descriptor, or None if it has none."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # a notebook's, or a test's
        return None
    with contextlib.suppress(OSError):
        stream.flush()
    return descriptor
