"""The files of a run's numbers: lines, a table of evaluations, and the tables of the classes."""

import csv
from pathlib import Path

from paceline.core.results import ClassCount, ClassTable, EvalReport, EvalResult
from paceline.core.run_dir import RunDir, read_lines
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe
from paceline.training.logging.base import EvalRecord, eval_columns
from paceline.training.logging.build import build_sinks
from paceline.training.logging.files import FileSink


def recipe(*words: str) -> Recipe:
    return load("digits", Patch.parse(["log.tensorboard=off", *words])).recipe


def judged(top1: float) -> EvalResult:
    return EvalResult(images=8, top1=top1, top5=1.0, loss=2.0, ece=0.125, mean_class_accuracy=top1)


def record(step: int, report: EvalReport) -> EvalRecord:
    return EvalRecord(step, step / 8, 8 * step, 1.5, report, train_s=1.25, epoch_s=2.5, images_per_s=25.6)


def test_lines_and_table_agree_and_go_on_after_a_resume(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    words = ("train.ema.decay=0.9",)
    for resume_step, steps in [(0, (4, 8, 12)), (8, (12, 16))]:
        sinks = build_sinks(rundir, recipe(*words), resume_step, [])
        for step in steps:
            sinks.evaluated(record(step, EvalReport(val=judged(0.5), ema=judged(0.625))))
        sinks.close()
    lines = list(read_lines(rundir.evals))
    with rundir.metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [line["step"] for line in lines] == [4, 8, 12, 16]
    assert rows == [{name: str(value) for name, value in line.items()} for line in lines]


def test_warnings_are_kept_over_a_resume_and_need_no_file_before_the_first(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    for message in ("first", "second"):
        sink = FileSink(rundir, 0, eval_columns(recipe().train, recipe().optim), now=lambda: 1e9)
        assert rundir.warnings.exists() == (message == "second")
        sink.warned(message)
        sink.close()
    assert list(read_lines(rundir.warnings)) == [
        {"unix_s": 1e9, "message": "first"},
        {"unix_s": 1e9, "message": "second"},
    ]


def test_the_tables_of_the_classes_are_those_of_the_last_evaluation(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    sink = FileSink(rundir, 0, eval_columns(recipe().train, recipe().optim))
    for correct in (1, 2):
        table = ClassTable((ClassCount("a", 4, correct), ClassCount("b", 4, 4)), ((correct, 4 - correct), (0, 4)))
        sink.evaluated(record(4 * correct, EvalReport(val=judged(0.5), classes=table)))
    sink.close()
    assert rundir.classes.read_text().splitlines() == ["class,images,correct,accuracy", "a,4,2,0.5", "b,4,4,1.0"]
    assert rundir.confusion.read_text().splitlines() == ["true\\predicted,a,b", "a,2,2", "b,0,4"]
