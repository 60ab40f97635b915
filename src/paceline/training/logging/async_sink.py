"""Run third-party trackers in a thread each, so that training waits for none of them."""

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from paceline.core.errors import PacelineError
from paceline.core.results import RunResult
from paceline.core.units import seconds
from paceline.measure.timer import now_s
from paceline.recipe.plan import Plan
from paceline.training.logging.base import ForwardingSink, LogSink

FLUSH_S: Final = 10.0
"""Seconds for all trackers together to flush at the end of a run. Chosen: a preempted run has `checkpoint.grace`
(60 s), and is saved before."""
STARTUP_S: Final = 10.0
"""Seconds for all trackers together to start before the first step. Chosen: importing W&B, MLflow and trackio took 5 s
on two busy cores, measured."""
MAX_QUEUED: Final = 10_000
"""Most queued records per tracker, about 10 MB; more are dropped."""


class TimeBudget:
    """A time budget, in seconds, that several sinks share from the first use on."""

    def __init__(self, total_s: float = FLUSH_S, now: Callable[[], float] = now_s) -> None:
        self.total_s = total_s
        self._now = now
        self._started_s: float | None = None

    def remaining_s(self) -> float:
        """Return the seconds left, at least 0."""
        now_s = self._now()
        self._started_s = now_s if self._started_s is None else self._started_s
        return max(0.0, self.total_s - (now_s - self._started_s))


class AsyncSink(ForwardingSink):
    """Create a sink by `make` in another thread, and forward all calls to it in order.

    Only the constructor and `close` block, within their budgets. The first exception of the sink becomes a warning;
    later calls are still tried, unless the sink could not be created or `started` failed.
    """

    def __init__(
        self,
        make: Callable[[], LogSink],
        name: str,
        warn: Callable[[str], None],
        close_budget: TimeBudget,
        startup_budget: TimeBudget,
    ) -> None:
        self._make = make
        self._name = name
        self._warn = warn
        self._close_budget = close_budget
        self._calls: queue.SimpleQueue[Callable[[LogSink], None] | None] = queue.SimpleQueue()
        self._has_warned = False
        self._is_ending = False
        self._is_given_up = False
        self._is_made = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()
        # Wait for the package's imports: a fork during an import can hang, and imports would slow the first steps.
        self._is_made.wait(startup_budget.remaining_s())

    def started(self, plan: Plan, step: int) -> None:
        """Forward the plan."""

        def start(sink: LogSink) -> None:
            self._is_given_up = True  # until `started` returns
            sink.started(plan, step)
            self._is_given_up = False

        self.forward(start)

    def finished(self, result: RunResult) -> None:
        """Forward the result regardless of the queue's length, and request closing."""
        self._calls.put(lambda sink: sink.finished(result))
        self.request_close()  # not only in `close`: all sinks close concurrently

    def request_close(self) -> None:
        """Request closing after the queued calls, without waiting."""
        if not self._is_ending:
            self._is_ending = True
            self._calls.put(lambda sink: sink.close())
            self._calls.put(None)

    def close(self) -> None:
        """Request closing and wait within the time budget; then abandon the thread."""
        self.request_close()
        self._thread.join(self._close_budget.remaining_s())
        if self._thread.is_alive():
            self._warn_once(
                f"did not finish within {seconds(self._close_budget.total_s)}; the remaining records are dropped"
            )
        self._has_warned = True  # later warnings have no reader

    def forward(self, call: Callable[[LogSink], None]) -> None:
        """Queue `call`."""
        if self._calls.qsize() < MAX_QUEUED:
            self._calls.put(call)
        else:
            self._warn_once(f"does not respond, and {MAX_QUEUED:,} records are queued")

    def _run(self) -> None:
        made: list[LogSink] = []
        self._call_safely(lambda: made.append(self._make()))
        self._is_made.set()
        for call in iter(self._calls.get, None):
            if made and not self._is_given_up:
                self._call_safely(partial(call, made[0]))

    def _call_safely(self, call: Callable[[], None]) -> None:
        try:
            call()
        except PacelineError as error:  # names the field itself
            self._warn_once(str(error), is_complete=True)
        except BaseException as error:  # third-party code may raise anything, even SystemExit
            self._warn_once(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")

    def _warn_once(self, message: str, *, is_complete: bool = False) -> None:
        if not self._has_warned:
            self._has_warned = True
            line = message if is_complete else f"{self._name}: {message}"
            self._warn(f"{line} (training continues; the run directory has every record)")
