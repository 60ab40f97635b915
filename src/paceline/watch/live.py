"""A line now and then that says what the watched command is doing. Torch-free."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Final, TextIO

from paceline.core.stages import OTHER, display_name
from paceline.core.units import milliseconds, percent
from paceline.watch.records import ProcessRecords, RecordReader

_FIRST_S: Final = 5.0
_EVERY_S: Final = 15.0
_AGAIN_S: Final = 2.0  # after a look that found no new step, as during start-up
_RECENT_STEPS: Final = 100
_NUM_STAGES: Final = 4


class LiveLine:
    """Print the step time and the longest stages of rank 0 every 15 seconds.

    A whole line, not a line that changes in place: the command prints to the same terminal.
    """

    def __init__(self, reader: RecordReader, out: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._reader = reader
        self._out = out
        self._now = now
        self._next_s = now() + _FIRST_S
        self._last = ""

    def __call__(self) -> None:
        """Print a line if it is due and there are new steps."""
        if self._now() < self._next_s:
            return
        try:
            self._next_s = self._now() + (_EVERY_S if self._print() else _AGAIN_S)
        except Exception:  # such as a lost terminal, or a bug: neither may end the training
            self._next_s = math.inf

    def _print(self) -> bool:
        self._reader.update()
        text = describe_progress(self._reader.processes())
        is_new = bool(text) and text != self._last
        if is_new:
            self._last = text
            # \r and the escape remove the progress bar that a script may have there; it draws a new one.
            print(f"\r\x1b[Kpaceline watch: {text}", file=self._out, flush=True)
        return is_new


def describe_progress(processes: Sequence[ProcessRecords]) -> str:
    """Return `step 120, 45.2 ms per step: backward 41 %, forward 22 %`; "" without steps."""
    main = [each for each in processes if each.process.rank == 0] or processes
    if not main:
        return ""
    records = max(main, key=lambda each: each.ended_s + each.process.offset_s)
    steps = records.steps[-_RECENT_STEPS:]
    totals: dict[str, float] = {}
    for step in steps:
        for name, each_s in (step.device_stages or step.stages).items():
            totals[name] = totals.get(name, 0.0) + each_s
    whole_s = sum(totals.values())
    if not whole_s:
        return ""
    longest = sorted((each for each in totals.items() if each[0] != OTHER), key=lambda each: -each[1])[:_NUM_STAGES]
    shares = [f"{display_name(name)} {percent(each_s / whole_s)}" for name, each_s in longest if each_s]
    return f"step {steps[-1].n:,}, {milliseconds(whole_s / len(steps))} per step: {', '.join(shares)}"
