"""A run that goes on: its id in a tracker, and the records that are read back."""

from paceline.core.run_dir import RunDir
from paceline.training.logging.base import eval_columns
from paceline.training.logging.files import FileSink, read_history
from paceline.training.logging.trackers import TrackerRun, eval_metrics


def test_a_tracker_run_is_found_again(tmp_path) -> None:
    run = TrackerRun(RunDir(tmp_path), "wandb")
    assert run.id == "" and run.title == tmp_path.name
    assert TrackerRun(RunDir(tmp_path), "wandb").id == "" != run.create()
    assert TrackerRun(RunDir(tmp_path), "wandb").id == run.id
    assert [path.name for path in tmp_path.iterdir()] == ["tracking.wandb.json"]


def test_a_damaged_file_is_no_run_and_an_unwritable_one_no_error(tmp_path) -> None:
    for text in ("", "[]", '{"step": 1}'):
        (tmp_path / "tracking.a.json").write_text(text)
        assert TrackerRun(RunDir(tmp_path), "a").id == ""
    assert TrackerRun(RunDir(tmp_path / "missing"), "a").create("x") == "x"


def test_history_is_read_back_in_order_up_to_a_step(tmp_path, recipe, step, evaluation) -> None:
    files = FileSink(RunDir(tmp_path), 0, eval_columns(recipe().train, recipe().optim))
    for number in (2, 4, 6, 8):
        files.step(step(number))
        if number % 4 == 0:
            files.evaluated(evaluation(number))
    files.close()
    assert [record.step for record in read_history(RunDir(tmp_path), 6)] == [2, 4, 4, 6]


def test_records_read_back_are_those_that_were_written(tmp_path, recipe, step, evaluation) -> None:
    rundir = RunDir(tmp_path)
    files = FileSink(rundir, 0, eval_columns(recipe().train, recipe().optim))
    files.step(step(4))
    files.evaluated(evaluation(4))
    files.close()
    logged, judged = read_history(rundir, 4)
    assert logged == step(4)
    assert eval_metrics(judged) == eval_metrics(evaluation(4))
