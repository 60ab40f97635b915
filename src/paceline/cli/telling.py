"""Tell what goes on while runs are made: on a terminal which one runs, and a line for each that has ended."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TextIO

from paceline.data.sources.places import printable_lines
from paceline.lab.trial import Trial

Begins = Callable[[Trial, int], None]
Say = Callable[[str], None]


@contextlib.contextmanager
def telling(out: TextIO, total: int | None = None) -> Iterator[tuple[Begins, Say]]:
    """Give what is to be called as each run begins, which a terminal shows while it runs, and what says a line.

    `total` is how many runs there will be, None where nobody knows yet. An `out` that is no terminal gets lines alone.
    """
    from rich.console import Console

    console = Console(file=out, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        yield lambda trial, repeat: None, lambda line: print(printable_lines(line), file=out, flush=True)
        return
    num_begun = 0
    with console.status("") as status:

        def begins(trial: Trial, repeat: int) -> None:
            nonlocal num_begun
            num_begun += 1
            of_how_many = "" if total is None else f" of {total}"
            status.update(f"{trial.name} (run {num_begun}{of_how_many})")

        yield begins, lambda line: console.print(printable_lines(line), soft_wrap=True)
