"""Where evaluations are written: flat rows whose keys are known before the first, and the tables of the classes."""

import csv
import resource
import signal
from pathlib import Path

import pytest

from paceline.core.class_table import ClassCount, ClassTable
from paceline.core.results import EvalReport, EvalResult
from paceline.core.rundir import RunDir, read_lines
from paceline.recipe.load import load
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe
from paceline.train.logsink import EvalRecord, FileSink, StepRecord, Unfailing, build_sinks, eval_columns, eval_row

PLAIN = ["step", "epoch", "images_seen", "trained_s", "images", "top1", "top5", "loss", "ece", "mean_class_accuracy"]
AVERAGED = ["ema_top1", "ema_top5", "ema_loss", "ema_ece", "ema_mean_class_accuracy"]
TRAINED = ["train_top1", "train_loss", "gap"]


def recipe(*words: str) -> Recipe:
    return load("digits", Patch.parse(["log.tensorboard=off", *words])).recipe


def judged(top1: float) -> EvalResult:
    return EvalResult(images=8, top1=top1, top5=1.0, loss=2.0, ece=0.125, mean_class_accuracy=top1)


def record(step: int, report: EvalReport) -> EvalRecord:
    return EvalRecord(step, step / 8, 8 * step, 1.5, report)


REPORTS = {
    (): EvalReport(val=judged(0.5)),
    ("train.ema.decay=0.9",): EvalReport(val=judged(0.5), ema=judged(0.625)),
    ("optim.name=schedule_free", "schedule.name=constant"): EvalReport(val=judged(0.5), ema=judged(0.625)),
    ("train.eval_train=on",): EvalReport(val=judged(0.5), train=judged(0.75)),
    ("train.ema.decay=0.9", "train.eval_train=on"): EvalReport(val=judged(0.5), ema=judged(0.625), train=judged(0.75)),
}


@pytest.mark.parametrize("words", REPORTS, ids=lambda words: " ".join(words) or "plain")
def test_the_columns_are_known_from_the_recipe(words: tuple[str, ...]) -> None:
    assert tuple(eval_row(record(4, REPORTS[words]))) == eval_columns(recipe(*words))


def test_a_row_has_the_raw_weights_the_averaged_ones_and_the_gap() -> None:
    row = eval_row(record(4, EvalReport(val=judged(0.5), ema=judged(0.625), train=judged(0.75))))
    assert list(row) == [*PLAIN, *AVERAGED, *TRAINED]
    assert row == {
        "step": 4, "epoch": 0.5, "images_seen": 32, "trained_s": 1.5,
        "images": 8, "top1": 0.5, "top5": 1.0, "loss": 2.0, "ece": 0.125, "mean_class_accuracy": 0.5,
        "ema_top1": 0.625, "ema_top5": 1.0, "ema_loss": 2.0, "ema_ece": 0.125, "ema_mean_class_accuracy": 0.625,
        "train_top1": 0.75, "train_loss": 2.0, "gap": 0.25,
    }  # fmt: skip


def test_what_was_not_asked_for_has_no_column() -> None:
    assert list(eval_row(record(4, EvalReport(val=judged(0.5))))) == PLAIN


def test_lines_and_table_agree_and_go_on_after_a_resume(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    words = ("train.ema.decay=0.9",)
    for resume_step, steps in [(0, (4, 8, 12)), (8, (12, 16))]:
        sinks = build_sinks(rundir, recipe(*words), resume_step, [])
        for step in steps:
            sinks.evaluated(record(step, REPORTS[words]))
        sinks.close()
    lines = list(read_lines(rundir.evals))
    with rundir.metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [line["step"] for line in lines] == [4, 8, 12, 16]
    assert rows == [{name: str(value) for name, value in line.items()} for line in lines]


def test_warnings_are_kept_over_a_resume_and_need_no_file_before_the_first(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    for message in ("first", "second"):
        sink = FileSink(rundir, 0, eval_columns(recipe()), now=lambda: 1e9)
        assert rundir.warnings.exists() == (message == "second")
        sink.warned(message)
        sink.close()
    assert list(read_lines(rundir.warnings)) == [
        {"unix_s": 1e9, "message": "first"},
        {"unix_s": 1e9, "message": "second"},
    ]


class Heard:
    """Note the warnings, and nothing else."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def started(self, plan, step) -> None: ...

    def step(self, record) -> None: ...

    def evaluated(self, record) -> None: ...

    def warned(self, message: str) -> None:
        self.warnings.append(message)

    def close(self) -> None: ...


# matrix: 30
def test_records_that_a_full_disk_refuses_are_told_once_and_come_when_there_is_room(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: it fails at the same call, and can be lifted."""
    rundir, heard = RunDir(tmp_path), Heard()
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    sinks = build_sinks(rundir, recipe(), 0, [heard])
    try:
        sinks.step(StepRecord(1, 0.1, 8, 1.0, 0.1, 1.0, 1.0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (rundir.steps.stat().st_size + 10, limits[1]))
        for step in (2, 3):
            sinks.step(StepRecord(step, 0.1, 8, 1.0, 0.1, 1.0, 1.0))
        assert list(read_lines(rundir.steps))[-1]["step"] == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    sinks.step(StepRecord(4, 0.1, 8, 1.0, 0.1, 1.0, 1.0))
    sinks.close()
    assert [line["step"] for line in read_lines(rundir.steps)] == [1, 2, 3, 4]
    assert heard.warnings == [
        "log: a record cannot be written: File too large (training goes on; mend it to have more)"
    ]


def test_only_what_the_disk_refuses_is_forgiven() -> None:
    class Broken(Heard):
        def step(self, record) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Unfailing(Broken(), Heard()).step(StepRecord(1, 0.1, 8, 1.0, 0.1, 1.0, 1.0))


def test_the_tables_of_the_classes_are_those_of_the_last_evaluation(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    sink = FileSink(rundir, 0, eval_columns(recipe()))
    for correct in (1, 2):
        table = ClassTable((ClassCount("a", 4, correct), ClassCount("b", 4, 4)), ((correct, 4 - correct), (0, 4)))
        sink.evaluated(record(4 * correct, EvalReport(val=judged(0.5), classes=table)))
    sink.close()
    assert rundir.classes.read_text().splitlines() == ["class,images,correct,accuracy", "a,4,2,0.5", "b,4,4,1.0"]
    assert rundir.confusion.read_text().splitlines() == ["true\\predicted,a,b", "a,2,2", "b,0,4"]


def test_tensorboards_own_reader_finds_averages_and_gap(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    asked = recipe("log.tensorboard=on", "train.ema.decay=0.9", "train.eval_train=on")
    sinks = build_sinks(RunDir(tmp_path), asked, 0, [])
    sinks.evaluated(record(4, EvalReport(val=judged(0.5), ema=judged(0.625), train=judged(0.75))))
    sinks.close()
    events = reading.EventAccumulator(str(RunDir(tmp_path).tensorboard)).Reload()
    found = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    names = ("top1", "top5", "loss", "ece", "mean_class_accuracy")
    expected = {f"val/{name}": [getattr(judged(0.5), name)] for name in names}
    expected |= {f"ema/{name}": [getattr(judged(0.625), name)] for name in names}
    assert found == expected | {"train_eval/top1": [0.75], "train_eval/loss": [2.0], "gap": [0.25]}
