"""Run third-party trackers in a thread, and log no step twice.

After a resume, the steps since the checkpoint run again with the same results. Trackers, unlike TensorBoard, cannot
purge them, so these records are skipped; records that a tracker missed are read from the run directory.
"""

import contextlib
import json
import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from paceline.core.errors import PacelineError
from paceline.core.files import replace_file
from paceline.core.json_file import read_json
from paceline.core.results import RunResult
from paceline.core.run_dir import RunDir
from paceline.core.units import seconds
from paceline.measure.timer import now_s
from paceline.recipe.plan import Plan
from paceline.training.logging.base import EvalRecord, LogSink, StepRecord

FLUSH_S: Final = 10.0
"""Seconds for all trackers together to flush at the end of a run. Chosen: a preempted run has `checkpoint.grace`
(60 s), and is saved before."""
STARTUP_S: Final = 10.0
"""Seconds for all trackers together to start before the first step. Chosen: importing W&B, MLflow and trackio took 5 s
on two busy cores, measured."""
MAX_QUEUED: Final = 10_000
"""Most queued records per tracker, about 10 MB; more are dropped."""
_ID_BYTES: Final = 4
"""As in W&B's own IDs: 8 characters."""


class TrackerState:
    """`tracking.NAME.json` in the run directory. Without it the tracker starts over.

    `run_id` is the tracker's run ID ("": none yet), `location` that of its records ("": only one), `step` and
    `evaluation` the last ones it received.
    """

    def __init__(self, rundir: RunDir, name: str) -> None:
        self._path = rundir.path / f"tracking.{name.replace(':', '-')}.json"
        self.title = rundir.path.resolve().name
        self.run_id, self.location, self.step, self.evaluation = _read_tracker_state(self._path)

    @property
    def is_new(self) -> bool:
        """Whether the tracker has no run for this one yet."""
        return not self.run_id

    def set_run_id(self, run_id: str = "") -> str:
        """Store the tracker's run ID, or generate one; return it."""
        self.run_id = run_id or secrets.token_hex(_ID_BYTES)
        self._write()
        return self.run_id

    def set_location(self, location: str) -> None:
        """Set the location of the records. A new location has received nothing."""
        if location != self.location:
            self.location, self.step, self.evaluation = location, 0, 0
            self._write()

    def mark_step(self, step: int) -> None:
        """Record that the tracker has the logged step `step`."""
        self.step = step
        self._write()

    def mark_evaluation(self, step: int) -> None:
        """Record that the tracker has the evaluation after `step`."""
        self.evaluation = step
        self._write()

    def _write(self) -> None:
        values = {"run": self.run_id, "place": self.location, "step": self.step, "evaluation": self.evaluation}
        # Not synced: a process that dies does not lose it. 0.2 ms (median) per logged step on a local disk, measured.
        # A full disk only causes duplicate records after a restart.
        with contextlib.suppress(OSError), replace_file(self._path, sync=False) as file:
            file.write(json.dumps(values).encode() + b"\n")


def _read_tracker_state(path: Path) -> tuple[str, str, int, int]:
    try:
        values = read_json(path)
        return str(values["run"]), str(values["place"]), int(values["step"]), int(values["evaluation"])
    except (OSError, OverflowError, ValueError, KeyError, TypeError):
        return "", "", 0, 0


class DedupSink:
    """Forward to `inner` the records that it has not received yet, according to `state`.

    `read_history` returns the records of the run up to a step; missed ones are forwarded before the next record.
    """

    def __init__(
        self, inner: LogSink, state: TrackerState, read_history: Callable[[int], Iterable[StepRecord | EvalRecord]]
    ) -> None:
        self._inner = inner
        self._tracker_state = state
        self._read_history = read_history
        self._missed: Iterable[StepRecord | EvalRecord] = ()

    def started(self, plan: Plan, step: int) -> None:
        """Forward the plan, and prepare the missed records."""
        self._inner.started(plan, step)
        self._missed = self._read_history(step)  # not forwarded now: a rejected one would look like a failed start

    def step(self, record: StepRecord) -> None:
        """Forward a logged step if it is new."""
        with self._after_missed_records():
            self._pass_if_new(record)

    def evaluated(self, record: EvalRecord) -> None:
        """Forward an evaluation if it is new."""
        with self._after_missed_records():
            self._pass_if_new(record)

    def warned(self, message: str) -> None:
        """Forward a warning."""
        self._inner.warned(message)

    def finished(self, result: RunResult) -> None:
        """Forward the result."""
        with self._after_missed_records():
            self._inner.finished(result)

    def close(self) -> None:
        """Close `inner`."""
        with self._after_missed_records():
            self._inner.close()

    @contextlib.contextmanager
    def _after_missed_records(self) -> Iterator[None]:
        """Forward all missed records, run the body, then raise the first error of these records."""
        before, self._missed = self._missed, ()
        first_error: Exception | None = None
        try:
            for record in before:
                try:
                    self._pass_if_new(record)
                except Exception as error:
                    first_error = first_error or error
        except Exception as error:  # the files cannot be read
            first_error = first_error or error
        yield
        if first_error:
            raise first_error

    def _pass_if_new(self, record: StepRecord | EvalRecord) -> None:
        """Forward a record that is new to the tracker, and remember it unless it is rejected."""
        if isinstance(record, StepRecord):
            if record.step > self._tracker_state.step:
                self._inner.step(record)
                self._tracker_state.mark_step(record.step)
        elif record.step > self._tracker_state.evaluation:
            self._inner.evaluated(record)
            self._tracker_state.mark_evaluation(record.step)


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


class AsyncSink:
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

        self._enqueue(start)

    def step(self, record: StepRecord) -> None:
        """Forward a logged step."""
        self._enqueue(lambda sink: sink.step(record))

    def evaluated(self, record: EvalRecord) -> None:
        """Forward an evaluation."""
        self._enqueue(lambda sink: sink.evaluated(record))

    def warned(self, message: str) -> None:
        """Forward a warning."""
        self._enqueue(lambda sink: sink.warned(message))

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

    def _enqueue(self, call: Callable[[LogSink], None]) -> None:
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
