"""Progress of experiments: on a terminal the current run, and a line per finished run."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TextIO

from paceline.data.sources.places import printable_lines
from paceline.lab.trial import Trial

OnRunStart = Callable[[Trial, int], None]
PrintLine = Callable[[str], None]


@contextlib.contextmanager
def progress_output(out: TextIO, total: int | None = None) -> Iterator[tuple[OnRunStart, PrintLine]]:
    """Yield a function to call as each run starts, and one that prints a line.

    `total` is the number of runs, None if unknown. Without a terminal only lines are printed.
    """
    from rich.console import Console

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
