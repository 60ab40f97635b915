"""How far a data verb is: a live bar with the time left on a terminal, a line every ten seconds elsewhere. On stderr.

Where it is not known yet how much there is to do, only what is done is told.
"""

import sys
import time
from collections.abc import Callable
from typing import Final, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from paceline.core.units import duration, size

_QUIET_S: Final = 10.0
_SETTLED_S: Final = 1.0
"""Before that, a speed says nothing of the time left."""


class Reporter(Protocol):
    """Say how far the work is. Use it as a context."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the context was entered."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, done: int, total: int, facts: str = "") -> None:
        """Say that `done` of `total` is done; `facts` are further words."""
        ...


class Lines:
    """A line every ten seconds."""

    def __init__(self, noun: str, now: Callable[[], float] = time.perf_counter) -> None:
        self._noun = noun
        self._now = now
        self._began_s = self._said_s = now()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the context was entered."""
        return self._now() - self._began_s

    def __enter__(self) -> Self:
        self._began_s = self._said_s = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, done: int, total: int, facts: str = "") -> None:
        """Say it where the last line is long enough ago."""
        if self._now() - self._said_s >= _QUIET_S:
            self._said_s = self._now()
            print(
                "  ".join([amount(done, total, self._noun), *_facts(done, total, self.elapsed_s, self._noun, facts)]),
                file=sys.stderr,
            )


class Bar:
    """A live bar."""

    def __init__(self, noun: str, console: Console, now: Callable[[], float] = time.perf_counter) -> None:
        self._noun = noun
        self._now = now
        self._began_s = now()
        text = TextColumn("{task.fields[amount]}  {task.fields[facts]}", markup=False)
        self._progress = Progress(BarColumn(bar_width=24), text, console=console, transient=True)
        self._task = self._progress.add_task("", total=None, amount="starting", facts="")

    @property
    def elapsed_s(self) -> float:
        """Seconds since the context was entered."""
        return self._now() - self._began_s

    def __enter__(self) -> Self:
        self._began_s = self._now()
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, done: int, total: int, facts: str = "") -> None:
        """Move the bar."""
        told = "  ".join(_facts(done, total, self.elapsed_s, self._noun, facts))
        self._progress.update(
            self._task, total=total, completed=done, amount=amount(done, total, self._noun), facts=told
        )


def build_progress(noun: str) -> Reporter:
    """Return what tells of `images` or `bytes`: a bar on a terminal, lines elsewhere."""
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    return Bar(noun, console) if console.is_terminal else Lines(noun)


def amount(done: int, total: int, noun: str) -> str:
    """Return `120/500 images`, or `1.20 GB of 3.00 GB`."""
    return f"{size(done)} of {size(total)}" if noun == "bytes" else f"{done:,}/{total:,} {noun}"


def _facts(done: int, total: int, elapsed_s: float, noun: str, facts: str) -> list[str]:
    rate = done / max(elapsed_s, 1e-9)
    told = [f"{size(rate)}/s" if noun == "bytes" else f"{rate:,.0f} {noun}/s"]
    if done and elapsed_s >= _SETTLED_S:
        told.append(f"{duration((total - done) / rate)} left")
    return [*filter(None, [facts]), *told]
