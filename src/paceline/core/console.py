"""Standard output and error that may be full or closed without stopping the process that prints to them.

A run continues without its progress output and records the loss. If a command's result, such as JSON, cannot be
written, the command fails.
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
    """The result of a command cannot be written to standard output."""


class _DescriptorFile(io.FileIO):
    """A raw file on a console descriptor that records the first failed write."""

    def __init__(self, number: int, name: str, lost: str) -> None:
        super().__init__(number, "w", closefd=False)
        self._name = name
        self._is_closed = bool(lost)
        self._report: Callable[[str], None] = lambda message: None
        self.lost = lost
        self.raises = True

    def write(self, data: Any) -> int:
        """Write `data`, or drop it if the console is lost and `raises` is False."""
        try:
            if self._is_closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            written = super().write(data)
        except OSError as error:
            self._record_failure(error)
        else:
            # None: a non-blocking descriptor whose reader is slow. Progress output is then dropped, as waiting would
            # stall training.
            if written is not None or self.raises:
                return written
        return len(data)

    def report_to(self, report: Callable[[str], None]) -> None:
        """Call `report` once with the loss of the console, now or when it happens."""
        self._report = report
        if self.lost:
            report(self._message())

    def _record_failure(self, error: OSError) -> None:
        is_first, self.lost = not self.lost, self.lost or error.strerror or str(error)
        if isinstance(error, BrokenPipeError) and self.raises:
            raise error  # the reader of a pipe has ended, as in `| head`: the command line exits silently
        if self.raises:
            raise ConsoleLostError(error.errno, f"{self._name}: cannot be written: {error.strerror}")
        if is_first:
            self._report(self._message())

    def _message(self) -> str:
        return f"{self._name}: cannot be written: {self.lost} (the run continues; its files have every record)"


class Console(io.TextIOWrapper):
    """Standard output or error as text. Until `ignore_errors`, a failed write raises `OSError`.

    `carries_result`: the command was started for this output. Characters that the encoding lacks are escaped.
    """

    def __init__(self, number: int, name: str, like: TextIO | None) -> None:
        lost = "it is closed" if like is None else ""
        # A closed descriptor may belong to another file by now, so write to the null device instead.
        self._descriptor = _DescriptorFile(os.open(os.devnull, os.O_WRONLY) if lost else number, name, lost)
        errors = getattr(like, "errors", None) or "strict"
        super().__init__(
            io.BufferedWriter(self._descriptor),
            encoding=getattr(like, "encoding", None),
            errors="backslashreplace" if errors == "strict" else errors,
            line_buffering=name == "stderr" or bool(getattr(like, "line_buffering", False)),
            write_through=bool(getattr(like, "write_through", False)),
        )
        self._like = like  # keep it alive: its finalizer would close the descriptor
        self.carries_result = False

    @property
    def lost(self) -> str:
        """Reason of the first failed write, or ""."""
        return self._descriptor.lost

    def ignore_errors(self) -> None:
        """Drop failed writes from now on."""
        self._descriptor.raises = False

    def report_loss(self, report: Callable[[str], None]) -> None:
        """Call `report` with one line once the console is lost, from the thread that notices."""
        self._descriptor.report_to(report)


def secure_console() -> None:
    """Replace `sys.stdout` and `sys.stderr` by consoles; stderr ignores errors. Call it before any file is opened."""
    # A file or socket that gets the number of a closed standard stream would be mistaken for it, here and in children.
    for number in range(len(_STREAMS)):
        _open_if_closed(number)
    for number, name in enumerate(_STREAMS):
        stream = getattr(sys, name)
        descriptor = number if stream is None else _descriptor_of(stream)
        if name != "stdin" and descriptor is not None:
            setattr(sys, name, Console(descriptor, name, stream))
    if isinstance(sys.stderr, Console):
        sys.stderr.ignore_errors()


def progress_console(*, as_json: bool) -> TextIO:
    """Return the stream for progress output, whose loss is ignored: stderr with `as_json`, else stdout.

    With `as_json`, stdout receives the result; check `lost_output_reason` at the end.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Console):
            stream.ignore_errors()
    if as_json and isinstance(sys.stdout, Console):
        sys.stdout.carries_result = True
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
    return sys.stdout.lost if isinstance(sys.stdout, Console) and sys.stdout.carries_result else ""


def _open_if_closed(number: int) -> None:
    """Open the null device as descriptor `number` if it is closed; all lower ones must be open."""
    try:
        os.fstat(number)
    except OSError:
        with contextlib.suppress(OSError):  # open() returns the lowest free number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _descriptor_of(stream: TextIO) -> int | None:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # of a notebook or of pytest
        return None
    with contextlib.suppress(OSError):
        stream.flush()  # the new console has its own buffer: keep the order of the output
    return descriptor
