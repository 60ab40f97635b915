"""Progress of experiments and of data verbs: a status line or bar on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from paceline.core.units import duration, per_second, size
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


class DataProgress:
    """Context that reports progress: a live bar on a terminal, else a line every ten seconds.

    `noun` is `images` or `bytes`, `console` stderr by default.
    """

    def __init__(self, noun: str, console: Console | None = None, now: Callable[[], float] = time.perf_counter) -> None:
        self._noun = noun
        self._now = now
        self._start_s = self._printed_s = now()
        console = console or Console(stderr=True, markup=False, emoji=False, highlight=False)
        self._is_terminal = console.is_terminal
        text = TextColumn("{task.fields[amount]}  {task.fields[facts]}", markup=False)
        self._bar = Progress(
            BarColumn(bar_width=24), text, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bar.add_task("", total=None, amount="starting", facts="")

    @property
    def elapsed_s(self) -> float:
        """Seconds since the context was entered."""
        return self._now() - self._start_s

    def __enter__(self) -> Self:
        self._start_s = self._printed_s = self._now()
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int, facts: str = "") -> None:
        """Report `done` of `total`, with `facts` as further text."""
        if not self._is_terminal and self._now() - self._printed_s < _LINE_INTERVAL_S:
            return
        self._printed_s = self._now()
        amount = f"{size(done)} of {size(total)}" if self._noun == "bytes" else f"{done:,}/{total:,} {self._noun}"
        per_s = done / max(self.elapsed_s, 1e-9)
        texts = [facts] if facts else []
        texts.append(f"{size(per_s)}/s" if self._noun == "bytes" else f"{per_second(per_s)} {self._noun}/s")
        if done and self.elapsed_s >= _MIN_RATE_S:
            texts.append(f"{duration((total - done) / per_s)} left")
        if self._is_terminal:
            self._bar.update(self._task, total=total, completed=done, amount=amount, facts="  ".join(texts))
        else:
            print("  ".join([amount, *texts]), file=sys.stderr)
