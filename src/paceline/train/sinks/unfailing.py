"""Keep training if a disk or console refuses a record."""

from collections.abc import Callable

from paceline.core.results import RunResult
from paceline.recipe.plan import Plan
from paceline.train.logsink import EvalRecord, LogSink, StepRecord


class SafeSink:
    """Forward to `inner`; if it fails to write, warn `others` and continue.

    `name` appears in the warning. Consecutive failures give one warning. Failed records stay in the file buffers and
    are retried with the next record, until the buffers overflow.
    """

    def __init__(self, inner: LogSink, others: LogSink, name: str = "log") -> None:
        self._inner = inner
        self._others = others
        self._name = name
        self._has_failed = False

    def started(self, plan: Plan, step: int) -> None:
        """Forward the plan."""
        self._call_safely(lambda: self._inner.started(plan, step))

    def step(self, record: StepRecord) -> None:
        """Forward a logged step."""
        self._call_safely(lambda: self._inner.step(record))

    def evaluated(self, record: EvalRecord) -> None:
        """Forward an evaluation."""
        self._call_safely(lambda: self._inner.evaluated(record))

    def warned(self, message: str) -> None:
        """Forward a warning."""
        self._call_safely(lambda: self._inner.warned(message))

    def finished(self, result: RunResult) -> None:
        """Forward the result."""
        self._call_safely(lambda: self._inner.finished(result))

    def close(self) -> None:
        """Close `inner`."""
        self._call_safely(self._inner.close)

    def _call_safely(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, UnicodeError) as error:
            is_news, self._has_failed = (
                not self._has_failed,
                True,
            )  # before the others are warned, since they may fail too
            if is_news:
                what = getattr(error, "strerror", None) or str(error)
                self._others.warned(
                    f"{self._name}: a record cannot be written: {what} (training continues; fix the cause)"
                )
        else:
            self._has_failed = False
