"""A disk or console that refuses a record does not end a run."""

from collections.abc import Callable

from paceline.core.results import RunResult
from paceline.recipe.plan import Plan
from paceline.train.logsink import EvalRecord, LogSink, StepRecord


class Unfailing:
    """Pass everything to `inner`; a disk that refuses it is a warning to `others`, and not the end of the run.

    `name` is what the warning calls it. One warning stands for all refusals in a row. What was refused stays in the
    buffers of its files, is tried again with the next record, and is lost when it comes to more than they hold.
    """

    def __init__(self, inner: LogSink, others: LogSink, name: str = "log") -> None:
        self._inner = inner
        self._others = others
        self._name = name
        self._has_failed = False

    def started(self, plan: Plan, step: int) -> None:
        """Pass the plan on."""
        self._try(lambda: self._inner.started(plan, step))

    def step(self, record: StepRecord) -> None:
        """Pass a logged step on."""
        self._try(lambda: self._inner.step(record))

    def evaluated(self, record: EvalRecord) -> None:
        """Pass an evaluation on."""
        self._try(lambda: self._inner.evaluated(record))

    def warned(self, message: str) -> None:
        """Pass a warning on."""
        self._try(lambda: self._inner.warned(message))

    def finished(self, result: RunResult) -> None:
        """Pass the result on."""
        self._try(lambda: self._inner.finished(result))

    def close(self) -> None:
        """Close it."""
        self._try(self._inner.close)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, UnicodeError) as error:
            is_news, self._has_failed = not self._has_failed, True  # before the others are told, who may fail too
            if is_news:
                what = getattr(error, "strerror", None) or str(error)
                self._others.warned(
                    f"{self._name}: a record cannot be written: {what} (training goes on; mend it to have more)"
                )
        else:
            self._has_failed = False
