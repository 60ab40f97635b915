"""The first lines of a command: what it starts, and what it waits for while imports, ranks and data take seconds."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, Self, TextIO

from paceline.core.errors import PacelineError
from paceline.core.host import usable_cores
from paceline.core.units import count
from paceline.data.files import printable
from paceline.parallel.environ import count_gpus, world_from_environ

IMPORTING: Final = "importing PyTorch"
_SILENCE_S: Final = 2.0
"""Seconds without output after which a command says what it waits for."""


def describe_hardware(device: str = "auto") -> str:
    """Return `2 GPUs`, or `2 CPU cores` on a machine without GPUs or for the device `cpu`."""
    gpus = 0 if device == "cpu" else count_gpus(os.environ)
    return count(gpus, "GPU") if gpus else count(usable_cores(), "CPU core")


def starting_message(ranks: int, device: str) -> str:
    """Return the first line of a run: its ranks and hardware."""
    return first_line(f"starting {count(ranks, 'rank')} on {describe_hardware(device)}")


def first_line(text: str) -> str:
    """Return the line that a command prints first."""
    from paceline import __version__

    return f"paceline {__version__}: {printable(text)}"


def announce(text: str) -> "WaitNotes":
    """Print the first line of a command to a person at a terminal, on stderr, as stdout has the result.

    The returned context tells of long imports.
    """
    is_shown = sys.stderr is not None and sys.stderr.isatty() and _is_main()
    if is_shown:
        print(first_line(text), file=sys.stderr, flush=True)
    return WaitNotes(sys.stderr if is_shown else None)


def _is_main() -> bool:
    try:
        world = world_from_environ(os.environ)
        return world.is_main and world.launcher != "local"  # the process that started these ranks has announced them
    except PacelineError:  # the verb reports it, if it matters to it
        return True


class WaitNotes:
    """Context that prints what a command is doing once that has lasted for two seconds; None prints nothing.

    `follow` replaces the constant `doing`.
    """

    def __init__(self, out: TextIO | None, silence_s: float = _SILENCE_S) -> None:
        self._out = out
        self._silence_s = silence_s
        self._get_doing: Callable[[], str] = lambda: IMPORTING
        self._is_closed = threading.Event()
        self._lock = threading.Lock()

    def follow(self, get_doing: Callable[[], str]) -> None:
        """Print what `get_doing` returns from now on; "" is nothing."""
        self._get_doing = get_doing

    def close(self) -> None:
        """Print nothing from now on."""
        with self._lock:  # a note that is being printed comes before the next output
            self._is_closed.set()

    def __enter__(self) -> Self:
        if self._out is not None:
            # A daemon: it must not keep a process alive whose start has failed.
            threading.Thread(target=self._watch, args=(self._out,), name="start-up", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch(self, out: TextIO) -> None:
        doing, since_s, is_printed = "", time.monotonic(), True
        while not self._is_closed.wait(self._silence_s / 20):
            if self._get_doing() != doing:
                doing = self._get_doing()
                since_s, is_printed = time.monotonic(), not doing
            if not is_printed and time.monotonic() - since_s >= self._silence_s:
                is_printed = True
                with self._lock:
                    if not self._is_closed.is_set():
                        print(f"{doing} ...", file=out, flush=True)
