"""Progress of a training run: a live bar on a terminal, plain lines elsewhere."""

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn

from paceline.core.metric import describe_metrics
from paceline.core.results import ClassTable, EstimateResult, EvalResult
from paceline.core.stages import DATA_WAIT, EXPOSED
from paceline.core.units import accuracy, count, duration, per_second, seconds, size
from paceline.data.files import printable_lines
from paceline.measure.time_estimate import PlannedWork, RunEstimator
from paceline.recipe.plan import Plan
from paceline.training.logging.base import EvalRecord, LogSink, StepRecord

if TYPE_CHECKING:  # it imports torch
    from paceline.training.process import ProgressReporter

GetPosition = Callable[[], tuple[int, str]]
"""Return the number of completed steps and the current stage."""
_UNEVEN: Final = 1.5
"""Ratio of the largest to the smallest class from which both are printed."""
_MIN_LEFT_S: Final = 5.0
_STAGE_TEXT: Final = {"evaluate": "evaluating", "checkpoint": "saving"}


class TrainProgress(LogSink):
    """Progress of a run: its plan and pace, and the newest record. `where` returns the position of the run."""

    def __init__(self, where: GetPosition | None, now: Callable[[], float]) -> None:
        self._get_position = where
        self._now = now
        self._record: StepRecord | None = None
        self._plan: Plan | None = None
        self._own_pace: RunEstimator | None = None
        self.before_start: Callable[[], None] = lambda: None
        self.get_estimator: Callable[[], RunEstimator | None] = lambda: None

    @property
    def _pace(self) -> RunEstimator | None:
        """The run's estimator; one of its own, which counts no pauses, before the run has one."""
        return self.get_estimator() or self._own_pace

    def follow(self, position: "ProgressReporter") -> None:
        """Use the estimator of the run at `position`, and print its estimate."""
        self.get_estimator = lambda: position.estimator
        position.on_estimate = self.estimated

    def _update(self, step: int) -> None:
        # The run itself updates its estimator.
        if self._own_pace is not None:
            self._own_pace.update(step)

    def started(self, plan: Plan, step: int) -> None:
        """Print what the run will do."""
        self.before_start()
        self._plan = plan
        self._own_pace = RunEstimator(PlannedWork.from_plan(plan), step, self._now)
        self.print_line(run_summary(plan, step))

    def estimated(self, estimate: EstimateResult) -> None:
        """Print the time that the run will take, and the memory it needs, unless the run is about to end."""
        if estimate.forecast.predicted_s >= _MIN_LEFT_S:
            self.print_line(describe_estimate(estimate))

    def evaluated(self, record: EvalRecord) -> None:
        """Print the result of an evaluation."""
        assert self._plan is not None
        self.print_line(f"{_position_text(record.step, record.epoch, self._plan)}  {_eval_text(record)}")

    def warned(self, message: str) -> None:
        """Print a warning."""
        self.print_line(f"warning: {message}")

    def print_line(self, line: str) -> None:
        """Print a line."""
        raise NotImplementedError


class PlainProgress(TrainProgress):
    """Print a line at the start, every ten seconds, and after each evaluation.

    With `where`, a thread polls the run every second, so that long steps are reported too.
    """

    _INTERVAL_S = 10.0
    _LONG_RUN_S = 30.0
    """A run with more seconds than this to go reports its remaining time as soon as it is known."""

    def __init__(
        self, out: TextIO, where: GetPosition | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(where, now)
        self._out = out
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._reported_s = now()
        self._reported_step = -1

    def started(self, plan: Plan, step: int) -> None:
        """Print what the run will do."""
        super().started(plan, step)
        self._reported_s = self._now()
        if self._get_position is not None:
            # A daemon: it must not keep a process alive whose training failed.
            threading.Thread(target=self._watch, args=(self._get_position,), name="progress", daemon=True).start()

    def step(self, record: StepRecord) -> None:
        """Print loss and speed, at most every ten seconds."""
        self._record = record
        self.report_if_due(record.step)

    def report_if_due(self, step: int) -> None:
        """Print progress if a line is due after `step` steps."""
        assert self._plan is not None and self._pace is not None
        with self._lock:
            self._update(step)
            left_s, is_first = self._pace.left_s, self._reported_step < 0
            is_due = self._now() - self._reported_s >= self._INTERVAL_S and step > self._reported_step
            if left_s is None or not (is_due or (is_first and left_s > self._LONG_RUN_S)):
                return
            self._reported_s, self._reported_step = self._now(), step
            facts = "  ".join(text for _, text in _status_items(self._plan, self._pace, self._record))
            self.print_line(f"{_position_text(step, step / self._plan.steps_per_epoch, self._plan)}  {facts}")

    def close(self) -> None:
        """Stop printing."""
        self._closed.set()

    def _watch(self, where: GetPosition) -> None:
        while not self._closed.wait(1.0):
            self.report_if_due(where()[0])

    def print_line(self, line: str) -> None:
        """Print a line."""
        print(printable_lines(line), file=self._out, flush=True)


class LiveProgress(TrainProgress):
    """Draw a bar for the current epoch with loss, learning rate, images/s and remaining time.

    It polls `where` when drawn, so that a step costs the run nothing.
    """

    _BAR = 20

    def __init__(
        self, console: Console, where: GetPosition | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(where, now)
        self._console = console
        self._task: TaskID | None = None
        self._bar = _Bar(
            self._draw,
            TextColumn("epoch {task.fields[epoch]}", markup=False),
            BarColumn(bar_width=self._BAR),
            TextColumn("{task.percentage:>3.0f}%  {task.fields[facts]}", markup=False),
            console=console,
            transient=True,
        )

    def started(self, plan: Plan, step: int) -> None:
        """Print what the run will do, and draw the bar."""
        super().started(plan, step)
        self._task = self._bar.add_task("", total=plan.steps_per_epoch, epoch=_epoch_text(step, plan), facts="starting")
        self._bar.start()

    def step(self, record: StepRecord) -> None:
        """Record loss and speed."""
        self._record = record
        self._update(record.step)

    def warned(self, message: str) -> None:
        """Print a warning above the bar."""
        # Unlike other lines, it may name a path, which must not be broken.
        self._console.print(f"warning: {printable_lines(message)}", highlight=False, soft_wrap=True)

    def print_line(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(printable_lines(line), highlight=False)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.stop()

    def _draw(self) -> None:
        if self._task is None or self._plan is None or self._pace is None:
            return
        stage = ""
        if self._get_position is not None:
            step, stage = self._get_position()
            self._update(step)
        step, plan = self._pace.step, self._plan
        epoch = _epoch_text(max(0, step - 1), plan)
        room = self._console.width - len(f"epoch {epoch}  100%   ") - self._BAR
        facts = self._fit_status(stage.partition(",")[0], room)
        done = (step - 1) % plan.steps_per_epoch + 1 if step else 0
        self._bar.update(self._task, completed=done, epoch=epoch, facts=facts)

    def _fit_status(self, stage: str, room: int) -> str:
        """Return the status that fits: drop the shares of stages first, then learning rate, speed and loss."""
        assert self._plan is not None and self._pace is not None
        facts = _status_items(self._plan, self._pace, self._record) or [("start", "starting")]
        if stage in _STAGE_TEXT:
            facts.append(("stage", _STAGE_TEXT[stage]))
        step = f"step {self._pace.step:,}/{self._plan.total_steps:,}"
        order = (EXPOSED, DATA_WAIT, "lr", "speed", "loss")
        for num_dropped in range(len(order) + 1):
            text = "  ".join([step, *(text for name, text in facts if name not in order[:num_dropped])])
            if len(text) <= room:
                return text
        return step


class _Bar(Progress):
    """Progress bar that calls `draw` before each refresh."""

    def __init__(self, draw: Callable[[], None], *columns: ProgressColumn, **options: Any) -> None:
        self._before_draw = draw
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the renderables."""
        self._before_draw()
        yield from super().get_renderables()


def build_train_progress(
    out: TextIO, position: "ProgressReporter | None" = None, *, before_start: Callable[[], None] = lambda: None
) -> LogSink:
    """Return a live bar for a terminal, else plain lines; `position` is that of the run.

    `before_start` is called before the plan is printed.
    """
    console = Console(file=out, markup=False, emoji=False, highlight=False)
    progress = LiveProgress(console, position) if console.is_terminal else PlainProgress(out, position)
    progress.before_start = before_start
    if position is not None:
        progress.follow(position)
    return progress


def _status_items(plan: Plan, pace: RunEstimator, record: StepRecord | None) -> list[tuple[str, str]]:
    facts = []
    if record is not None:
        facts += [("loss", f"loss {record.loss:.4f}"), ("lr", f"lr {record.lr:.4g}")]
    if record is not None or pace.step_s:
        images_per_s = record.images_per_s if record is not None else plan.batch_size / (pace.step_s or math.inf)
        facts.append(("speed", f"{per_second(images_per_s)} images/s"))
    if pace.left_s is not None:
        facts.append(("left", f"{duration(pace.left_s)} left"))
    shares = record.stage_shares if record is not None else {}
    for stage, label in ((DATA_WAIT, "data wait"), (EXPOSED, "communication")):
        if stage in shares:
            facts.append((stage, f"{label} {100 * shares[stage]:.0f} %"))
    return facts


def run_summary(plan: Plan, step: int) -> str:
    """Return lines about the data, the length of the run and its learning rate, and one per note."""
    work, (fewest, most) = PlannedWork.from_plan(plan), plan.class_images
    start = f"from step {step:,}: " if step else ""
    epochs = count(round(plan.total_steps / plan.steps_per_epoch, 2), "epoch")
    each = f" of {fewest:,} to {most:,} images" if most > _UNEVEN * fewest else ""
    data = f"{start}{plan.train_images:,} images, {plan.num_classes} classes{each}, {plan.image_size} px"
    saves = count(work.checkpoints(), "checkpoint")
    if plan.checkpoint_every_s:
        saves = f"a checkpoint every {duration(plan.checkpoint_every_s)}"
    length = f"{plan.total_steps:,} steps of {plan.batch_size} ({epochs}) on {count(plan.world_size, 'rank')}"
    pauses = [
        *([count(work.evaluations(), "evaluation")] if plan.eval_every else []),
        *([saves + (f" (up to {size(plan.disk_bytes)} on disk)" if plan.disk_bytes else "")] if work.saves else []),
    ]
    lines = [data, length, *([", ".join(pauses)] if pauses else []), f"learning rate {plan.lr_sentence}"]
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def describe_estimate(estimate: EstimateResult) -> str:
    """Return `about 12 min 05 s left (11 min 10 s to 13 min 40 s), peak memory 3.1 GB of 15.7 GB`."""
    forecast = estimate.forecast
    left, low, high = map(duration, (forecast.predicted_s, forecast.low_s, forecast.high_s))
    memory = f"{size(estimate.memory_bytes)} of {size(estimate.memory_total_bytes)}"
    return f"about {left} left ({low} to {high}), peak memory {memory}"


def _epoch_text(step: int, plan: Plan) -> str:
    total = -(-plan.total_steps // plan.steps_per_epoch)
    return f"{min(plan.epoch_of(step) + 1, total)}/{total}"


def _position_text(step: int, epoch: float, plan: Plan) -> str:
    epochs, steps = f"{round(plan.total_steps / plan.steps_per_epoch, 2):g}", f"{plan.total_steps:,}"
    return f"epoch {round(epoch, 2):{len(epochs)}g}/{epochs}  step {step:{len(steps)},}/{steps}"


def _eval_text(record: EvalRecord) -> str:
    """Return the result of an evaluation, with times of the whole run so far and of the last epoch."""
    report = record.report
    val = report.val
    parts = [*_accuracy_texts("val", val, report.classes), f"loss {val.loss:.4f}"]
    parts += describe_metrics(val)
    if report.ema is not None:
        parts += _accuracy_texts("ema", report.ema, report.classes, with_top5=False)
    if report.train is not None and report.gap is not None:
        parts.append(f"train top1 {accuracy(report.train.top1)}")
    if record.batch_top1 is not None:
        parts.append(f"batches top1 {accuracy(record.batch_top1)}")
    if record.skipped:
        parts.append(f"{count(record.skipped, 'step')} skipped")
    parts.append(f"after {duration(record.trained_s)}")
    if record.epoch_s is not None:
        parts.append(f"epoch {seconds(record.epoch_s)}")
    if record.images_per_s is not None:
        parts.append(f"{per_second(record.images_per_s)} images/s")
    return "  ".join(parts)


def _accuracy_texts(whose: str, result: EvalResult, classes: ClassTable | None, *, with_top5: bool = True) -> list[str]:
    if math.isnan(result.top1):  # several labels per image
        return [whose]
    parts = [f"{whose} top1 {accuracy(result.top1)}"]
    if classes is not None and classes.is_uneven and result.mean_class_accuracy is not None:
        parts.append(f"balanced accuracy {accuracy(result.mean_class_accuracy)}")
    return [*parts, *([f"top5 {accuracy(result.top5)}"] if with_top5 else [])]
