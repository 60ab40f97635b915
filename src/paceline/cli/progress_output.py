"""Progress of experiments and of data verbs: a status line or bar on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from paceline.core.units import duration, size
from paceline.data.files import printable_lines
from paceline.lab.trial import Trial

OnRunStart = Callable[[Trial, int], None]
PrintLine = Callable[[str], None]
_LINE_INTERVAL_S: Final = 10.0
_MIN_RATE_S: Final = 1.0
"""Seconds before a rate is reliable enough to estimate the remaining time."""


@contextlib.contextmanager
def progress_output(out: TextIO, total: int | None = None) -> Iterator[tuple[OnRunStart, PrintLine]]:
    """Yield a function to call as each run starts, and one that prints a line.

    `total` is the number of runs, None if unknown.
    """
    console = Console(file=out, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        yield lambda trial, repeat: None, lambda line: print(printable_lines(line), file=out, flush=True)
        return
    num_started = 0
    with console.status("") as status:

        def on_start(trial: Trial, repeat: int) -> None:
            nonlocal num_started
            num_started += 1
            total_text = "" if total is None else f" of {total}"
            status.update(f"{trial.name} (run {num_started}{total_text})")

        yield on_start, lambda line: console.print(printable_lines(line), soft_wrap=True)


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
