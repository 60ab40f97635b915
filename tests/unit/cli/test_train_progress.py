"""Progress of a training run on a terminal and in a file."""

import io
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from paceline.cli.train_progress import LiveProgress, PlainProgress, build_train_progress
from paceline.core.dataset import DatasetInfo
from paceline.core.results import ClassCount, ClassTable, EstimateResult, EvalReport, EvalResult, TimeForecast
from paceline.core.units import duration
from paceline.recipe.load import Patch, load
from paceline.recipe.plan import Plan
from paceline.training.logging.base import EvalRecord, LogSink, StepRecord

INFO = DatasetInfo("made", "train", 640, ("a", "b"), 3, (8, 8), (0.5,) * 3, (0.5,) * 3, notes=("3 files left out",))
PLAN = Plan.derive(
    load("digits", Patch.parse(["data.batch_size=64", "train.epochs=10", "optim.lr=0.05"])).recipe,
    2,
    INFO,
    replace(INFO, split="val"),
)


def judged(top1: float) -> EvalResult:
    return EvalResult(images=360, top1=top1, top5=1.0, loss=0.5, ece=0.01, mean_class_accuracy=top1)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def run(sink: LogSink, clock: Clock | None = None) -> None:
    clock = clock or Clock()
    sink.started(PLAN, 0)
    clock.now_s += 2
    sink.step(StepRecord(5, 0.5, 320, 1.5, 0.05, 1000.0, 2.0))
    clock.now_s += 1
    sink.step(StepRecord(9, 0.9, 576, 1.4, 0.05, 1000.0, 3.0))
    clock.now_s += 9
    sink.step(StepRecord(10, 1.0, 640, 1.25, 0.05, 1280.0, 12.0))
    times = {"train_s": 12.0, "epoch_s": 12.0, "images_per_s": 640 / 12}
    sink.evaluated(EvalRecord(10, 1.0, 640, 13.0, EvalReport(val=judged(0.9)), **times))
    sink.close()


def test_plain_lines_are_the_plan_progress_and_evaluations() -> None:
    out, clock = io.StringIO(), Clock()
    run(PlainProgress(out, now=clock), clock)
    assert out.getvalue().splitlines() == [
        "640 images, 2 classes, 16 px",
        "100 steps of 64 (10 epochs) on 2 ranks",
        "3 evaluations, 3 checkpoints",
        "learning rate 0.05 (batch 64, no scaling), 2 epochs of warm-up",
        "note: train: 3 files left out",
        "note: val: 3 files left out",
        "epoch  1/10  step  10/100  loss 1.2500  lr 0.05  1,280 images/s  3 min 20 s left",
        "epoch  1/10  step  10/100  val top1 90.00 %  top5 100.00 %  loss 0.5000  "
        "after 13 s  epoch 12.0 s  53.3 images/s",
    ]


def test_a_line_has_data_wait_and_communication_where_they_are_known() -> None:
    out, clock = io.StringIO(), Clock()
    sink = PlainProgress(out, now=clock)
    sink.started(PLAN, 0)
    for step, shares in ((5, {}), (9, {"data_wait": 0.031}), (10, {"data_wait": 0.5, "exposed_communication": 0.09})):
        clock.now_s += 11
        sink.step(StepRecord(step, 0.9, 640, 1.4, 0.05, 1000.0, 2.0, stage_shares={**shares, "forward": 0.1}))
    sink.close()
    lines = out.getvalue().splitlines()
    assert "left  data wait 3 %" in lines[-2] and "communication" not in lines[-2]
    assert lines[-1].endswith("left  data wait 50 %  communication 9 %")


def test_ema_training_images_and_skipped_steps_are_printed_if_any() -> None:
    out = io.StringIO()
    sink = PlainProgress(out)
    sink.started(PLAN, 0)
    report = EvalReport(val=judged(0.9), ema=judged(0.925), train=judged(0.99))
    sink.evaluated(EvalRecord(10, 1.0, 640, 13.0, report, skipped=2))
    printed = "val top1 90.00 %  top5 100.00 %  loss 0.5000  ema top1 92.50 %  train top1 99.00 %"
    printed += "  2 steps skipped  after 13 s"
    assert out.getvalue().splitlines()[-1] == f"epoch  1/10  step  10/100  {printed}"


@pytest.mark.parametrize(("images", "expected"), [(110, True), (100, False)])
def test_the_class_mean_is_printed_for_imbalanced_classes(images, expected) -> None:
    out = io.StringIO()
    sink = PlainProgress(out)
    sink.started(PLAN, 0)
    classes = ClassTable((ClassCount("a", images, images), ClassCount("b", 10, 2), ClassCount("c", 0, 0)))
    val, ema = (judged(top1).model_copy(update={"mean_class_accuracy": 0.6}) for top1 in (0.9, 0.925))
    sink.evaluated(EvalRecord(10, 1.0, 640, 13.0, EvalReport(val=val, ema=ema, classes=classes)))
    mean = "  balanced accuracy 60.00 %" if expected else ""
    printed = f"val top1 90.00 %{mean}  top5 100.00 %  loss 0.5000  ema top1 92.50 %{mean}  after 13 s"
    assert out.getvalue().splitlines()[-1] == f"epoch  1/10  step  10/100  {printed}"


def test_a_terminal_gets_a_bar_and_keeps_the_evaluations() -> None:
    out = io.StringIO()
    run(LiveProgress(Console(file=out, force_terminal=True, width=120)))
    text = out.getvalue()
    assert "epoch 1/10" in text and "loss 1.2500" in text and "1,280 images/s" in text
    assert "val top1 90.00 %" in text


def test_plain_lines_have_the_time_left_from_the_second_step() -> None:
    """Steps of 75 s, logged every ten: a first loss would come after twelve minutes."""
    out, clock = io.StringIO(), Clock()
    sink = PlainProgress(out, now=clock)
    sink.started(PLAN, 0)
    for step in (1, 2, 2, 3):
        clock.now_s += 75 if step != 2 else 37.5
        sink.report_if_due(step)
    sink.close()
    assert out.getvalue().splitlines()[6:] == [
        "epoch 0.2/10  step   2/100  1.71 images/s  1 h 08 min left",
        "epoch 0.3/10  step   3/100  0.853 images/s  2 h 14 min left",
    ]


def test_unlogged_steps_are_reported_by_polling() -> None:
    out, at = io.StringIO(), [0]
    sink = PlainProgress(out, where=lambda: (at[0], "forward"))
    sink.started(PLAN, 0)
    for at[0] in (1, 2):
        wait_for(lambda: sink._pace is not None and sink._pace.step == at[0])
    wait_for(lambda: "left" in out.getvalue())
    sink.close()
    assert "step   2/100" in out.getvalue().splitlines()[6]


def test_the_bar_moves_at_every_step_and_shows_the_stage() -> None:
    out, clock, at = io.StringIO(), Clock(), [(0, "start, 3")]
    sink = LiveProgress(Console(file=out, force_terminal=True, width=120), where=lambda: at[0], now=clock)

    def shown() -> str:
        before = len(out.getvalue())
        sink._bar.refresh()
        return out.getvalue()[before:]

    sink.started(PLAN, 0)
    assert "starting" in shown() or "step 0/100" in shown()
    at[0], clock.now_s = (1, "forward"), 101.0
    assert "step 1/100" in shown() and "left" not in shown()
    at[0], clock.now_s = (2, "forward"), 111.0
    assert (
        "step 2/100" in shown() and "6.40 images/s" in shown() and "18 min 00 s left" in shown() and " 20%" in shown()
    )
    at[0] = (10, "evaluate, 4")
    assert "step 10/100" in shown() and "100%" in shown() and "evaluating" in shown()
    at[0] = (11, "forward")
    assert "epoch 2/10" in shown() and " 10%" in shown()
    sink.close()


@pytest.mark.parametrize(
    ("width", "there", "gone"),
    [
        (120, ["loss", "lr", "images/s", "left"], []),
        (160, ["lr", "left", "data wait 3 %", "communication 9 %"], []),
        (80, ["loss", "left"], ["lr ", "data wait", "communication"]),
        (60, ["step", "left"], ["lr ", "images/s"]),
    ],
)
def test_a_narrow_terminal_drops_shares_and_the_learning_rate_first(width, there, gone):
    out, clock = io.StringIO(), Clock()
    sink = LiveProgress(Console(file=out, force_terminal=True, width=width, color_system=None), now=clock)
    sink.started(PLAN, 0)
    for step in (5, 9):
        clock.now_s += 1
        shares = {"data_wait": 0.03, "exposed_communication": 0.09}
        sink.step(StepRecord(step, 0.9, 576, 1.4, 0.05, 1280.0, 3.0, stage_shares=shares))
    before = len(out.getvalue())
    sink._bar.refresh()
    line = out.getvalue()[before:]
    assert all(word in line for word in there) and not any(word in line for word in gone)
    assert sum(line.count(cell) for cell in "━╸╺") == 18  # nine of the epoch's ten steps, of 20 cells
    sink.close()


def wait_for(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_warning_is_a_line_of_its_own_even_before_the_start() -> None:
    out = io.StringIO()
    sink = PlainProgress(out)
    sink.warned("disk: full (free some)")
    run(sink)
    sink.warned("[bold]")
    lines = out.getvalue().splitlines()
    assert (lines[0], lines[-1]) == ("warning: disk: full (free some)", "warning: [bold]")


def test_a_warning_stays_above_the_bar_and_whole() -> None:
    out = io.StringIO()
    sink = LiveProgress(Console(file=out, force_terminal=True, width=40, markup=False))
    long = "checkpoint: " + "x" * 60
    sink.warned(long)
    sink.started(PLAN, 0)
    sink.warned("[bold] below")
    sink.step(StepRecord(5, 0.5, 320, 1.5, 0.05, 1000.0, 2.0))
    sink.close()
    before, _, after = out.getvalue().partition("[bold] below")
    assert f"warning: {long}\n" in before and "warning: " in before.splitlines()[-1]
    assert "loss 1.5" in after or "epoch" in after, "the bar goes on"


def test_the_first_lines_name_the_step_a_resumed_run_starts_from() -> None:
    out = io.StringIO()
    PlainProgress(out).started(PLAN, 40)
    assert out.getvalue().startswith("from step 40: ")


def test_a_file_gets_plain_lines() -> None:
    assert isinstance(build_train_progress(io.StringIO()), PlainProgress)


def test_durations_read_as_a_clock_does() -> None:
    assert [duration(seconds) for seconds in (0.4, 7, 750, 11_100)] == ["0 s", "7 s", "12 min 30 s", "3 h 05 min"]


@pytest.mark.parametrize(
    ("left_s", "printed"),
    [(725.0, "about 12 min 05 s left (11 min 40 s to 12 min 30 s), peak memory 3 GB of 16 GB\n"), (2.0, "")],
)
def test_the_estimate_is_printed_unless_the_run_is_about_to_end(left_s: float, printed: str) -> None:
    out = io.StringIO()
    times = {"predicted_s": left_s, "low_s": left_s - 25, "high_s": left_s + 25, "step_s": 0.1, "eval_s": 1.0}
    forecast = TimeForecast(**times, steps=1, evaluations=1, checkpoints=0, checkpoint_s=0.0)
    memory = {"memory_bytes": 3_000_000_000, "memory_total_bytes": 16_000_000_000}
    PlainProgress(out).estimated(EstimateResult(step=5, made_s=20.0, forecast=forecast, **memory))
    assert out.getvalue() == printed
