"""What rank 0 says while it trains: a live bar on a terminal, plain lines elsewhere."""

from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from paceline.core.class_table import ClassTable
from paceline.core.results import EvalResult, RunResult
from paceline.core.units import accuracy, count, duration
from paceline.recipe.plan import Plan
from paceline.train.logsink import EvalRecord, LogSink, StepRecord


class PlainProgress:
    """A line at the start, at each logged step that a person would wait for, and at each evaluation."""

    _QUIET_S = 10.0

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._said_s = 0.0
        self._plan: Plan | None = None

    def started(self, plan: Plan, step: int) -> None:
        """Say what will be done."""
        self._plan = plan
        self._say(introduction(plan, step))

    def step(self, record: StepRecord) -> None:
        """Say how it goes, at most every ten seconds."""
        assert self._plan is not None
        if record.trained_s - self._said_s >= self._QUIET_S:
            self._said_s = record.trained_s
            self._say(
                f"{_place(record.step, record.epoch, self._plan)}  loss {record.loss:.4f}  lr {record.lr:.4g}  "
                f"{record.images_per_s:,.0f} images/s  {_left(record, self._plan)} left"
            )

    def evaluated(self, record: EvalRecord) -> None:
        """Say what came out."""
        assert self._plan is not None
        self._say(f"{_place(record.step, record.epoch, self._plan)}  {_judgement(record)}")

    def warned(self, message: str) -> None:
        """Say what to beware of."""
        self._say(f"warning: {message}")

    def finished(self, result: RunResult) -> None:
        """Do nothing: whoever started the run shows the result."""

    def close(self) -> None:
        """Say nothing more."""

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)


class LiveProgress:
    """A bar over the current epoch with loss, learning rate, images/s and time left; evaluations stay above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%  {task.fields[facts]}", markup=False),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._plan: Plan | None = None

    def started(self, plan: Plan, step: int) -> None:
        """Say what will be done, and draw the bar."""
        self._plan = plan
        self._console.print(introduction(plan, step))
        self._task = self._progress.add_task("", total=plan.steps_per_epoch, epoch=_epoch(step, plan), facts="starting")
        self._progress.start()

    def step(self, record: StepRecord) -> None:
        """Move the bar."""
        assert self._plan is not None and self._task is not None
        done = (record.step - 1) % self._plan.steps_per_epoch + 1
        facts = (
            f"step {record.step:,}/{self._plan.total_steps:,}  loss {record.loss:.4f}  lr {record.lr:.3g}  "
            f"{record.images_per_s:,.0f} images/s  {_left(record, self._plan)} left"
        )
        self._progress.update(self._task, completed=done, epoch=_epoch(record.step - 1, self._plan), facts=facts)

    def evaluated(self, record: EvalRecord) -> None:
        """Leave a line above the bar."""
        assert self._plan is not None
        line = f"{_place(record.step, record.epoch, self._plan)}  {_judgement(record)}"
        self._progress.console.print(line, highlight=False)

    def warned(self, message: str) -> None:
        """Leave a line above the bar."""
        self._progress.console.print(f"warning: {message}", highlight=False, soft_wrap=True)

    def finished(self, result: RunResult) -> None:
        """Do nothing: whoever started the run shows the result."""

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()


def build_progress(out: TextIO) -> LogSink:
    """Return live progress for a terminal, plain lines for anything else."""
    console = Console(file=out, markup=False, emoji=False, highlight=False)
    return LiveProgress(console) if console.is_terminal else PlainProgress(out)


def introduction(plan: Plan, step: int) -> str:
    """Return a line on what a run will do, one on its learning rate, and one for each thing to know about its data."""
    start = f"from step {step:,}: " if step else ""
    epochs = count(round(plan.total_steps / plan.steps_per_epoch, 2), "epoch")
    what = (
        f"{start}{plan.train_images:,} images, {plan.num_classes} classes, {plan.image_size} px; "
        f"{plan.total_steps:,} steps of {plan.batch_size} ({epochs}) on "
        f"{count(plan.world_size, 'rank')}"
    )
    return "\n".join([what, f"learning rate {plan.lr_sentence}", *(f"note: {note}" for note in plan.notes)])


def _epoch(step: int, plan: Plan) -> str:
    total = -(-plan.total_steps // plan.steps_per_epoch)
    return f"{min(plan.epoch_of(step) + 1, total)}/{total}"


def _place(step: int, epoch: float, plan: Plan) -> str:
    epochs, steps = f"{round(plan.total_steps / plan.steps_per_epoch, 2):g}", f"{plan.total_steps:,}"
    return f"epoch {round(epoch, 2):{len(epochs)}g}/{epochs}  step {step:{len(steps)},}/{steps}"


def _judgement(record: EvalRecord) -> str:
    """Return what came out; averaged weights, training images and skipped steps only where there are any.

    The mean over the classes is told where some have many more images than others.
    """
    report = record.report
    val = report.val
    parts = [*_accuracies("val", val, report.classes), f"loss {val.loss:.4f}"]
    if report.ema is not None:
        parts += _accuracies("ema", report.ema, report.classes, with_top5=False)
    if report.train is not None:
        parts.append(f"train top1 {accuracy(report.train.top1)}")
    if record.skipped:
        parts.append(f"{count(record.skipped, 'step')} skipped")
    return "  ".join([*parts, duration(record.trained_s)])


def _accuracies(whose: str, result: EvalResult, classes: ClassTable | None, *, with_top5: bool = True) -> list[str]:
    parts = [f"{whose} top1 {accuracy(result.top1)}"]
    if classes is not None and classes.is_uneven and result.mean_class_accuracy is not None:
        parts.append(f"mean of classes {accuracy(result.mean_class_accuracy)}")
    return [*parts, *([f"top5 {accuracy(result.top5)}"] if with_top5 else [])]


def _left(record: StepRecord, plan: Plan) -> str:
    """Return the time left, judged by the speed since the last record."""
    images = (plan.total_steps - record.step) * plan.batch_size
    return duration(images / record.images_per_s) if record.images_per_s else "?"
