"""Progress of data verbs on stderr: a live bar on a terminal, a line every ten seconds elsewhere.

While the total is unknown, only the completed amount is shown.
"""

import sys
import time
from collections.abc import Callable
from typing import Final, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from paceline.core.units import duration, size

_LINE_INTERVAL_S: Final = 10.0
_MIN_RATE_S: Final = 1.0
"""Seconds before a rate is reliable enough to estimate the remaining time."""


class DataProgress(Protocol):
    """Context that reports progress."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the context was entered."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, done: int, total: int, facts: str = "") -> None:
        """Report `done` of `total`, with `facts` as further text."""
        ...


class LineProgress:
    """Print a line every ten seconds."""

    def __init__(self, noun: str, now: Callable[[], float] = time.perf_counter) -> None:
        self._noun = noun
        self._now = now
        self._start_s = self._printed_s = now()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the context was entered."""
        return self._now() - self._start_s

    def __enter__(self) -> Self:
        self._start_s = self._printed_s = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, done: int, total: int, facts: str = "") -> None:
        """Print a line if one is due."""
        if self._now() - self._printed_s >= _LINE_INTERVAL_S:
            self._printed_s = self._now()
            print(
                "  ".join(
                    [amount_text(done, total, self._noun), *_rate_texts(done, total, self.elapsed_s, self._noun, facts)]
                ),
                file=sys.stderr,
            )


class BarProgress:
    """Draw a live bar."""

    def __init__(self, noun: str, console: Console, now: Callable[[], float] = time.perf_counter) -> None:
        self._noun = noun
        self._now = now
        self._start_s = now()
        text = TextColumn("{task.fields[amount]}  {task.fields[facts]}", markup=False)
        self._progress = Progress(BarColumn(bar_width=24), text, console=console, transient=True)
        self._task = self._progress.add_task("", total=None, amount="starting", facts="")

    @property
    def elapsed_s(self) -> float:
        """Seconds since the context was entered."""
        return self._now() - self._start_s

    def __enter__(self) -> Self:
        self._start_s = self._now()
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, done: int, total: int, facts: str = "") -> None:
        """Move the bar."""
        texts = "  ".join(_rate_texts(done, total, self.elapsed_s, self._noun, facts))
        self._progress.update(
            self._task, total=total, completed=done, amount=amount_text(done, total, self._noun), facts=texts
        )


def build_data_progress(noun: str) -> DataProgress:
    """Return a bar on a terminal, else lines; `noun` is `images` or `bytes`."""
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    return BarProgress(noun, console) if console.is_terminal else LineProgress(noun)


def amount_text(done: int, total: int, noun: str) -> str:
    """Return `120/500 images`, or `1.20 GB of 3.00 GB`."""
    return f"{size(done)} of {size(total)}" if noun == "bytes" else f"{done:,}/{total:,} {noun}"


def _rate_texts(done: int, total: int, elapsed_s: float, noun: str, facts: str) -> list[str]:
    rate = done / max(elapsed_s, 1e-9)
    texts = [f"{size(rate)}/s" if noun == "bytes" else f"{rate:,.0f} {noun}/s"]
    if done and elapsed_s >= _MIN_RATE_S:
        texts.append(f"{duration((total - done) / rate)} left")
    return [*filter(None, [facts]), *texts]
