"""What holds for any progress of any run: it comes back from JSON, and nothing that is due is missed or done twice."""

import json
from dataclasses import fields
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.results import EvalReport, EvalResult
from paceline.training.goodput import TimeSpent
from paceline.training.state import CorrectCounts, StepInterval, TrainingSinceEval, TrainState

SHARES = st.floats(0, 1)
NUMBERS = st.floats(allow_nan=False)
RESULTS = st.builds(
    EvalResult,
    images=st.integers(0, 10**9),
    top1=SHARES,
    top5=SHARES,
    loss=NUMBERS,
    ece=st.none() | NUMBERS,
    mean_class_accuracy=st.none() | SHARES,
)
REPORTS = st.builds(EvalReport, val=RESULTS, ema=st.none() | RESULTS, train=st.none() | RESULTS)
STEPS = st.integers(0, 10**12)
TIMES = st.floats(0, 1e9)
STATES = st.builds(
    TrainState,
    step=STEPS,
    skipped=STEPS,
    skips_in_row=STEPS,
    images_seen=STEPS,
    last=st.none() | REPORTS,
    last_step=st.integers(-1, 10**12),
    best=st.none() | RESULTS,
    best_step=st.integers(-1, 10**12),
    hits=st.integers(0, 100),
    trained_s=TIMES,
    target_s=st.none() | TIMES,
    loss_sum=st.floats(-1e30, 1e30),
    loss_steps=st.integers(0, 10**6),
    bad_images=st.lists(STEPS, max_size=5),
    spent=st.builds(TimeSpent, TIMES, TIMES, TIMES),
    train_s=TIMES,
    since_eval=st.builds(TrainingSinceEval, STEPS, TIMES, st.builds(CorrectCounts, STEPS, STEPS, STEPS)),
    since_log=st.builds(CorrectCounts, STEPS, STEPS, STEPS),
)


@given(STATES)
def test_progress_comes_back_from_a_checkpoint_as_it_was(state: TrainState) -> None:
    text = json.dumps(state.to_dict(), allow_nan=False)
    assert TrainState.from_dict(json.loads(text)) == state
    assert json.loads(text).keys() == {each.name for each in fields(TrainState)}


@given(STATES, st.integers(1, 10**5), st.integers(1, 50))
def test_steps_and_images_are_counted_together(state: TrainState, images: int, num_steps: int) -> None:
    step, seen = state.step, state.images_seen
    for _ in range(num_steps):
        state.advance(images)
    assert (state.step - step, state.images_seen - seen) == (num_steps, num_steps * images)


@given(STATES, st.lists(REPORTS, min_size=1, max_size=8))
def test_the_best_evaluation_is_the_first_of_the_highest(state: TrainState, reports: list[EvalReport]) -> None:
    state.best, start = None, state.step
    for report in reports:
        state.advance(1)
        state.record_evaluation(report)
    highest = max(report.primary.top1 for report in reports)
    first = next(place for place, report in enumerate(reports) if report.primary.top1 == highest)
    assert state.best == reports[first].primary and state.best_step == start + 1 + first
    assert (state.last, state.last_step) == (reports[-1], start + len(reports))


@given(st.integers(1, 60), st.integers(1, 300), st.lists(st.integers(0, 300), max_size=6))
def test_what_is_due_does_not_depend_on_where_a_run_was_stopped(every: int, last: int, stops: list[int]) -> None:
    whole = [step for step in range(1, last + 1) if StepInterval(every, last).is_due(step)]
    borders = [0, *sorted({min(stop, last) for stop in stops}), last]
    parts = [
        step
        for first, end in pairwise(borders)
        for step in range(first + 1, end + 1)
        if StepInterval(every, last).is_due(step)
    ]
    assert parts == whole
    assert whole[-1] == last and len(whole) == -(-last // every)
    assert not any(StepInterval(0, last).is_due(step) for step in range(last + 1))
