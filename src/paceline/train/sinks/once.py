"""A run that goes on tells nothing twice: its steps since the checkpoint come again, and come out as they did.

TensorBoard is told to forget them, and has them anew; trackers cannot forget, so they are not told again. What one
has not heard, since the process was killed before or since it is new, it is told from the run's own files.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

from paceline.core.results import RunResult
from paceline.recipe.plan import Plan
from paceline.train.logsink import EvalRecord, LogSink, StepRecord
from paceline.train.sinks.note import Note


class Once:
    """Pass to `inner` what it has not been told of before, by its `note`.

    `history` returns the records of the run up to a step, in order. They are told before what comes after `started`, so
    that one which is refused does not count as a tracker that cannot start.
    """

    def __init__(self, inner: LogSink, note: Note, history: Callable[[int], Iterable[StepRecord | EvalRecord]]) -> None:
        self._inner = inner
        self._note = note
        self._history = history
        self._before: Iterable[StepRecord | EvalRecord] = ()

    def started(self, plan: Plan, step: int) -> None:
        """Pass the plan on, and keep in mind what came before."""
        self._inner.started(plan, step)
        self._before = self._history(step)

    def step(self, record: StepRecord) -> None:
        """Pass a logged step on, unless it is one that came before."""
        with self._caught_up():
            self._pass(record)

    def evaluated(self, record: EvalRecord) -> None:
        """Pass an evaluation on, unless it is one that came before."""
        with self._caught_up():
            self._pass(record)

    def warned(self, message: str) -> None:
        """Pass a warning on."""
        self._inner.warned(message)

    def finished(self, result: RunResult) -> None:
        """Pass the result on."""
        with self._caught_up():
            self._inner.finished(result)

    def close(self) -> None:
        """Close it."""
        with self._caught_up():
            self._inner.close()

    @contextlib.contextmanager
    def _caught_up(self) -> Iterator[None]:
        """Tell what came before, all that is not refused, and raise the first refusal when the rest is told too."""
        before, self._before = self._before, ()
        refusal: Exception | None = None
        try:
            for record in before:
                try:
                    self._pass(record)
                except Exception as error:
                    refusal = refusal or error
        except Exception as error:  # the files themselves cannot be read
            refusal = refusal or error
        yield
        if refusal:
            raise refusal

    def _pass(self, record: StepRecord | EvalRecord) -> None:
        """Pass on a record that is new to the tracker, and note it; one that is refused is not noted."""
        if isinstance(record, StepRecord):
            if record.step > self._note.step:
                self._inner.step(record)
                self._note.told_step(record.step)
        elif record.step > self._note.evaluation:
            self._inner.evaluated(record)
            self._note.told_evaluation(record.step)
