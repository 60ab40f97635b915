"""Do not re-log steps after a resume.

The steps since the checkpoint run again with the same results. TensorBoard purges and rewrites them. Trackers cannot,
so these records are skipped; records that a tracker missed are read back from the run directory.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

from paceline.core.results import RunResult
from paceline.recipe.plan import Plan
from paceline.train.logsink import EvalRecord, LogSink, StepRecord
from paceline.train.sinks.note import TrackerState


class DedupSink:
    """Forward to `inner` the records that it has not received yet, according to `note`.

    `history` returns the records of the run up to a step. Missed records are forwarded before the first record after
    `started`, so that a rejected one does not count as a tracker that cannot start.
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
        self._missed = self._read_history(step)

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
        refusal: Exception | None = None
        try:
            for record in before:
                try:
                    self._pass_if_new(record)
                except Exception as error:
                    refusal = refusal or error
        except Exception as error:  # the files cannot be read
            refusal = refusal or error
        yield
        if refusal:
            raise refusal

    def _pass_if_new(self, record: StepRecord | EvalRecord) -> None:
        """Forward a record that is new to the tracker, and remember it unless it is rejected."""
        if isinstance(record, StepRecord):
            if record.step > self._tracker_state.step:
                self._inner.step(record)
                self._tracker_state.mark_step(record.step)
        elif record.step > self._tracker_state.evaluation:
            self._inner.evaluated(record)
            self._tracker_state.mark_evaluation(record.step)
