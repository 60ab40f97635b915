"""Somebody else's code that talks to a network or a disk: in a thread of its own, where it can fail or hang alone."""

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from paceline.core.errors import PacelineError
from paceline.core.results import RunResult
from paceline.core.units import seconds
from paceline.measure.timing import now_s
from paceline.recipe.plan import Plan
from paceline.train.logsink import EvalRecord, LogSink, StepRecord

FLUSH_S: Final = 10.0
"""What all trackers of a run together have to send what they hold at its end. Chosen, not measured: a run that is asked
to leave has `checkpoint.grace` (60 s), and is saved before this begins."""
MAKE_S: Final = 10.0
"""What all trackers of a run together have to be made before the first step. Chosen: on two busy cores W&B, MLflow
and trackio took 5 s to import, measured."""
MAX_WAITING: Final = 10_000
"""Records that wait for one tracker; more are not kept. Some 10 MB."""


class Patience:
    """Seconds that several have together, from when the first of them asks."""

    def __init__(self, whole_s: float = FLUSH_S, now: Callable[[], float] = now_s) -> None:
        self.whole_s = whole_s
        self._now = now
        self._began_s: float | None = None

    def left_s(self) -> float:
        """Return the seconds that are left, at least 0."""
        now_s = self._now()
        self._began_s = now_s if self._began_s is None else self._began_s
        return max(0.0, self.whole_s - (now_s - self._began_s))


class Aside:
    """Have `make` return a sink, and pass everything to it, in another thread and in order.

    No call waits, `close` no longer than `patience`, and this one until there is a sink, no longer than `beginning`:
    so what a package imports is there before processes are forked, which a half-done import can hang, and takes no time
    from the first steps.

    Whatever the sink raises is one warning by `warn`, the first time. What comes after it is tried, unless there is no
    sink, or it was `started` that failed: then nothing is passed on any more. `name` is what warnings call it.
    """

    def __init__(
        self,
        make: Callable[[], LogSink],
        name: str,
        warn: Callable[[str], None],
        patience: Patience,
        beginning: Patience,
    ) -> None:
        self._make = make
        self._name = name
        self._warn = warn
        self._patience = patience
        self._calls: queue.SimpleQueue[Callable[[LogSink], None] | None] = queue.SimpleQueue()
        self._is_quiet = False
        self._is_ending = False
        self._is_given_up = False
        self._is_made = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()
        self._is_made.wait(beginning.left_s())

    def started(self, plan: Plan, step: int) -> None:
        """Pass the plan on."""

        def start(sink: LogSink) -> None:
            self._is_given_up = True  # unless it comes back
            sink.started(plan, step)
            self._is_given_up = False

        self._put(start)

    def step(self, record: StepRecord) -> None:
        """Pass a logged step on."""
        self._put(lambda sink: sink.step(record))

    def evaluated(self, record: EvalRecord) -> None:
        """Pass an evaluation on."""
        self._put(lambda sink: sink.evaluated(record))

    def warned(self, message: str) -> None:
        """Pass a warning on."""
        self._put(lambda sink: sink.warned(message))

    def finished(self, result: RunResult) -> None:
        """Pass the result on, however much waits, and end: all may do so at once before the first is waited for."""
        self._calls.put(lambda sink: sink.finished(result))
        self.end()

    def end(self) -> None:
        """Have the sink end when it has taken what waits, and do not wait for that."""
        if not self._is_ending:
            self._is_ending = True
            self._calls.put(lambda sink: sink.close())
            self._calls.put(None)

    def close(self) -> None:
        """Have the sink end, and wait for it as long as there is patience; then it is left behind."""
        self.end()
        self._thread.join(self._patience.left_s())
        if self._thread.is_alive():
            self._tell(f"has not taken everything within {seconds(self._patience.whole_s)}, and the rest is left")
        self._is_quiet = True  # nobody reads what comes now

    def _put(self, call: Callable[[LogSink], None]) -> None:
        if self._calls.qsize() < MAX_WAITING:
            self._calls.put(call)
        else:
            self._tell(f"takes nothing any more, and {MAX_WAITING:,} records wait")

    def _work(self) -> None:
        made: list[LogSink] = []
        self._try(lambda: made.append(self._make()))
        self._is_made.set()
        for call in iter(self._calls.get, None):
            if made and not self._is_given_up:
                self._try(partial(call, made[0]))

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except PacelineError as error:  # which names the field itself
            self._tell(str(error), is_whole=True)
        except BaseException as error:  # somebody else's code may raise anything, SystemExit too
            self._tell(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")

    def _tell(self, what: str, *, is_whole: bool = False) -> None:
        if not self._is_quiet:
            self._is_quiet = True
            told = what if is_whole else f"{self._name}: {what}"
            self._warn(f"{told} (training goes on; the run directory has every record)")
