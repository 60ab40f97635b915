"""`measure.trace`: which steps torch's profiler is asked to record, and what is written of them."""

from pathlib import Path

from paceline.measure import StageClock
from paceline.measure.chrome_trace import trace_totals
from paceline.measure.profiler import MarkedClock, TraceMarks


def spans_for(path: Path, *, first_step: int = 2, num_steps: int = 2, warned: list[str] | None = None) -> TraceMarks:
    warn = refuse if warned is None else warned.append
    return TraceMarks(path, first_step=first_step, num_steps=num_steps, rank=0, world_size=1, warn=warn)


def refuse(message: str) -> None:
    raise AssertionError(message)


def run(spans: TraceMarks, num_steps: int) -> None:
    clock = MarkedClock(StageClock(), spans)
    for _ in range(num_steps):
        with clock.stage("forward"):
            pass
        clock.end_step(images=1)
    spans.finish()


def test_the_profiler_has_steps_to_warm_up_in(tmp_path: Path) -> None:
    traced = {}
    for first_step in (0, 2, 10):
        spans = spans_for(tmp_path / "rank0.json.gz", first_step=first_step)
        traced[first_step] = spans.steps
        spans.finish()

    assert traced == {0: range(2, 4), 2: range(2, 4), 10: range(10, 12)}


def test_recording_begins_and_ends_outside_of_steps(tmp_path: Path) -> None:
    spans = spans_for(tmp_path / "rank0.json.gz", first_step=4)
    switching = []
    for step in range(8):
        if spans.is_switching:
            switching.append(step)
        spans.end_step()

    assert switching == [1, 3, 5]  # warm-up from step 2 on, recording of 4 and 5, the end


def test_a_loop_that_ends_before_the_first_traced_step_leaves_no_file(tmp_path: Path) -> None:
    for num_steps in range(3):
        run(spans_for(tmp_path / "rank0.json.gz"), num_steps)
    assert list(tmp_path.iterdir()) == []


def test_a_loop_that_ends_meanwhile_leaves_the_steps_it_completed(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json.gz"
    spans = spans_for(path, num_steps=9)
    clock = MarkedClock(StageClock(), spans)
    for _ in range(3):
        with clock.stage("forward"):
            pass
        clock.end_step(images=1)
    with clock.stage("backward"):
        spans.finish()

    assert set(trace_totals(path)) == {"forward"}


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("in the way")
    warned: list[str] = []

    run(spans_for(tmp_path / "trace" / "rank0.json.gz", warned=warned), 6)

    assert warned == [
        f"{tmp_path}/trace/rank0.json.gz: the trace cannot be written: File exists (make room for the next one)"
    ]
