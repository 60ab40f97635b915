"""A run that goes on: what came before is not told again, and a note that is lost costs no more than that."""

from functools import partial

import pytest

from paceline.core.run_dir import RunDir
from paceline.training.logging.async_sink import DedupSink, TrackerState
from paceline.training.logging.base import eval_columns
from paceline.training.logging.files import FileSink, read_history
from paceline.training.logging.trackers import eval_metrics


def test_what_comes_again_after_a_resume_is_told_once(tmp_path, told, attempts) -> None:
    attempts(lambda start: DedupSink(told, TrackerState(RunDir(tmp_path), "a"), lambda last_step: ()))
    assert [call for call in told.calls if call[0] == "step"] == [("step", number) for number in range(2, 21, 2)]
    assert [call for call in told.calls if call[0] == "evaluated"] == [
        ("evaluated", number) for number in range(4, 21, 4)
    ]
    assert [call for call in told.calls if call[0] in ("started", "finished")] == [
        ("started", 0), ("finished", "preempted"), ("started", 10), ("finished", "completed"),
    ]  # fmt: skip


def test_what_was_refused_is_not_taken_for_told(tmp_path, told, step) -> None:
    class Refusing(type(told)):
        def step(self, record) -> None:
            raise OSError

    note = TrackerState(RunDir(tmp_path), "a")
    with pytest.raises(OSError):
        DedupSink(Refusing(), note, lambda last_step: ()).step(step(4))
    assert TrackerState(RunDir(tmp_path), "a").step == 0


def test_a_note_knows_the_run_and_how_far_it_was_told(tmp_path) -> None:
    note = TrackerState(RunDir(tmp_path), "pkg.mod:Sink")
    assert note.is_new and note.title == tmp_path.name
    name = note.set_run_id()
    note.set_location("online")
    note.mark_step(12)
    note.mark_evaluation(8)
    again = TrackerState(RunDir(tmp_path), "pkg.mod:Sink")
    assert (again.run_id, again.location, again.step, again.evaluation) == (name, "online", 12, 8)
    assert not again.is_new
    assert [path.name for path in tmp_path.iterdir()] == ["tracking.pkg.mod-Sink.json"]


def test_sinks_whose_paths_differ_in_the_colon_alone_have_a_note_each(tmp_path) -> None:
    TrackerState(RunDir(tmp_path), "a.b:C").mark_step(4)
    assert TrackerState(RunDir(tmp_path), "a:b.C").step == 0


def test_another_place_has_been_told_nothing_and_the_same_one_keeps_what_it_was_told(tmp_path) -> None:
    note = TrackerState(RunDir(tmp_path), "a")
    run = note.set_run_id()
    note.set_location("here")
    note.mark_step(4)
    note.mark_evaluation(4)
    note.set_location("here")
    assert (note.step, note.evaluation) == (4, 4)
    note.set_location("there")
    again = TrackerState(RunDir(tmp_path), "a")
    assert (again.run_id, again.step, again.evaluation) == (run, 0, 0)


def test_a_damaged_note_is_none(tmp_path) -> None:
    for text in ("", "[]", '{"run": 1}', '{"run": "a", "step": "x", "evaluation": 0}'):
        (tmp_path / "tracking.a.json").write_text(text)
        assert TrackerState(RunDir(tmp_path), "a").is_new


def test_a_note_that_cannot_be_written_is_no_error(tmp_path) -> None:
    note = TrackerState(RunDir(tmp_path / "missing"), "a")
    note.mark_step(3)
    assert note.step == 3


def test_what_was_not_heard_before_comes_from_the_files_in_order(
    tmp_path, told, recipe, plan, step, evaluation
) -> None:
    rundir = RunDir(tmp_path)
    files = FileSink(rundir, 0, eval_columns(recipe().train, recipe().optim))
    for number in (2, 4, 6, 8):
        files.step(step(number))
        if number % 4 == 0:
            files.evaluated(evaluation(number))
    files.close()
    note = TrackerState(rundir, "a")
    note.mark_step(2)
    sink = DedupSink(told, note, partial(read_history, rundir))
    sink.started(plan, 6)
    sink.step(step(8))
    assert told.calls == [("started", 6), ("step", 4), ("evaluated", 4), ("step", 6), ("step", 8)]


def test_a_record_of_before_that_is_refused_costs_itself_alone(tmp_path, told, plan, step) -> None:
    class Refusing(type(told)):
        def step(self, record) -> None:
            super().step(record)
            if record.step == 4:
                raise ConnectionError

    inner = Refusing()
    sink = DedupSink(inner, TrackerState(RunDir(tmp_path), "a"), lambda last_step: iter([step(2), step(4), step(6)]))
    sink.started(plan, 6)  # so the tracker has begun, and is told the rest
    with pytest.raises(ConnectionError):
        sink.step(step(8))
    sink.step(step(10))
    assert inner.calls == [("started", 6), *[("step", number) for number in (2, 4, 6, 8, 10)]]


def test_files_that_cannot_be_read_back_cost_what_came_before_alone(tmp_path, told, plan, step) -> None:
    def damaged(last_step: int):
        yield step(2)
        raise ValueError("no record")

    sink = DedupSink(told, TrackerState(RunDir(tmp_path), "a"), damaged)
    sink.started(plan, 6)
    with pytest.raises(ValueError, match="no record"):
        sink.step(step(8))
    assert told.calls == [("started", 6), ("step", 2), ("step", 8)]


def test_what_came_before_is_told_of_a_run_that_tells_nothing_more(tmp_path, told, plan, step) -> None:
    sink = DedupSink(told, TrackerState(RunDir(tmp_path), "a"), lambda last_step: iter([step(2)]))
    sink.started(plan, 2)
    sink.close()
    assert told.calls == [("started", 2), ("step", 2), "close"]


def test_records_read_back_are_those_that_were_written(tmp_path, recipe, step, evaluation) -> None:
    rundir = RunDir(tmp_path)
    files = FileSink(rundir, 0, eval_columns(recipe().train, recipe().optim))
    files.step(step(4))
    files.evaluated(evaluation(4))
    files.close()
    logged, judged = read_history(rundir, 4)
    assert logged == step(4)
    assert eval_metrics(judged) == eval_metrics(evaluation(4))
