"""Progress of a run in a notebook: an output that is redrawn in place, with a bar, a loss curve and the last lines."""

import sys
import time
from collections import deque
from collections.abc import Callable
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, TextIO

from paceline.cli.train_progress import TrainProgress, build_train_progress
from paceline.core.units import duration, per_second
from paceline.data.files import printable_lines
from paceline.training.logging.base import LogSink, StepRecord

if TYPE_CHECKING:  # it imports torch
    from paceline.training.process import ProgressReporter

_REDRAW_S: Final = 0.5
_MAX_LINES: Final = 12
_MAX_POINTS: Final = 400
"""Of the loss curve; from there on every second point is dropped, again and again."""
_WIDTH, _HEIGHT = 320, 60


class Output(Protocol):
    """An output of a notebook's cell (`IPython.display.DisplayHandle`)."""

    def update(self, html: Any) -> None:
        """Replace the content."""
        ...


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookView:
    """Draw steps and lines, at most every half second; `show` shows HTML, and returns its output."""

    def __init__(self, show: Callable[[str], Callable[[str], None]], now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._points: list[tuple[int, float]] = []
        self._keeps_every = 1
        self._num_steps = 0
        self._first: StepRecord | None = None
        self._last: tuple[StepRecord, int] | None = None
        self._drawn_s = now()
        self._update = show(self.render())

    def add_line(self, line: str) -> None:
        """Show `line` as the last one."""
        self._lines.extend(printable_lines(line).splitlines())
        self._draw()

    def step(self, record: StepRecord, total_steps: int) -> None:
        """Show a logged step of a run of `total_steps`."""
        self._first, self._last = self._first or record, (record, total_steps)
        if self._num_steps % self._keeps_every == 0:
            self._points.append((record.step, record.loss))
        self._num_steps += 1
        if len(self._points) > _MAX_POINTS:
            self._points, self._keeps_every = self._points[::2], 2 * self._keeps_every
        self._draw()

    def close(self) -> None:
        """Draw what was not drawn yet."""
        self._update(self.render())

    def _draw(self) -> None:
        if self._now() - self._drawn_s >= _REDRAW_S:
            self._drawn_s = self._now()
            self._update(self.render())

    def render(self) -> str:
        """Return the output as HTML."""
        parts = []
        if self._last is not None:
            record, total_steps = self._last
            text = f"step {record.step:,}/{total_steps:,}  loss {record.loss:.4f}  "
            text += f"{per_second(record.images_per_s)} images/s  {self._left(record, total_steps)}"
            parts.append(f'<progress value="{record.step}" max="{total_steps}" aria-label="steps"></progress> ')
            parts.append(f"<span>{escape(text.strip())}</span>{_loss_curve(self._points)}")
        return f"<div>{''.join(parts)}<pre>{escape(chr(10).join(self._lines))}</pre></div>"

    def _left(self, record: StepRecord, total_steps: int) -> str:
        assert self._first is not None
        steps = record.step - self._first.step
        if steps < 1 or record.step >= total_steps:
            return ""
        step_s = (record.trained_s - self._first.trained_s) / steps
        return f"{duration(step_s * (total_steps - record.step))} left"


def _loss_curve(points: list[tuple[int, float]]) -> str:
    """Return an SVG of (step, loss); "" for less than two finite ones."""
    finite = [(step, loss) for step, loss in points if abs(loss) < 1e6]  # not NaN either
    if len(finite) < 2:
        return ""
    first, last = finite[0][0], finite[-1][0]
    low, high = min(loss for _, loss in finite), max(loss for _, loss in finite)
    places = " ".join(
        f"{_WIDTH * (step - first) / max(1, last - first):.1f},{_HEIGHT * (high - loss) / (high - low or 1):.1f}"
        for step, loss in finite
    )
    label = f"training loss, {low:.4g} to {high:.4g}"
    return (
        f'<br><svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="-2 -2 {_WIDTH + 4} {_HEIGHT + 4}" role="img" '
        f'aria-label="{label}"><title>{label}</title>'
        f'<polyline points="{places}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )


def open_view() -> NotebookView:
    """Return a view in the cell that runs."""
    ipython: Any = import_module("IPython.display")

    def show(html: str) -> Callable[[str], None]:
        output: Output = ipython.display(ipython.HTML(html), display_id=True)
        return lambda text: output.update(ipython.HTML(text))

    return NotebookView(show)


class NotebookProgress(TrainProgress):
    """Progress of the run in this process, drawn in a `view`."""

    def __init__(self, view: NotebookView, position: "ProgressReporter | None" = None) -> None:
        super().__init__(position, time.monotonic)
        self._view = view

    def step(self, record: StepRecord) -> None:
        """Draw the step."""
        assert self._plan is not None
        self._view.step(record, self._plan.total_steps)

    def print_line(self, line: str) -> None:
        """Add a line."""
        self._view.add_line(line)

    def close(self) -> None:
        """Draw the last state."""
        self._view.close()


def build_progress(out: TextIO, position: "ProgressReporter", *, before_start: Callable[[], None]) -> LogSink:
    """Return an output that is redrawn for a notebook, else the progress of `build_train_progress`."""
    if not is_notebook() or out is not sys.stdout:
        return build_train_progress(out, position, before_start=before_start)
    progress = NotebookProgress(open_view(), position)
    progress.before_start = before_start
    progress.follow(position)
    return progress
