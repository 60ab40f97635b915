"""`measure.verdict`: the bottleneck, from summaries made by hand."""

import pytest

from paceline.core.units import Duration
from paceline.measure import ClockSummary, StageClock, StageTotal
from paceline.measure.verdict import verdict


def summary_of(*, evaluate_s: float = 0.0, **stages_s: float) -> ClockSummary:
    """Return the summary of 10 steps of 10 s in all; what the stages leave of it is `other`."""
    stages_s["other"] = 10.0 - sum(stages_s.values())
    return ClockSummary(
        n=10,
        images=320,
        wall_s=10.0,
        stages={name: StageTotal(seconds, seconds, seconds / 10) for name, seconds in stages_s.items()},
        warmup_s=0.0,
        pauses={"evaluate": evaluate_s} if evaluate_s else {},
        unfinished_s=0.0,
        step_s=(1.0,) * 10,
    )


def test_a_run_that_only_waits_is_input_bound() -> None:
    seconds = [0.0]
    clock = StageClock(now=lambda: seconds[0])
    with clock.stage("data_wait"):
        seconds[0] += 2.0
    clock.end_step(images=1)

    result = verdict(clock.drain(), workers=0, cores=8)

    assert result.bottleneck == "input-bound"
    assert result.evidence == "Waiting for data took 2 s of the 2 s of 1 step (100%)."
    assert result.try_ == ""


@pytest.mark.parametrize(
    ("data_wait_s", "workers", "to_try"),
    [(2.0, 0, "data.workers=1"), (8.0, 0, "data.workers=4"), (5.0, 2, "data.workers=4"), (9.0, 4, "data.workers=8")],
)
def test_workers_to_try_decode_a_batch_while_the_rest_of_a_step_runs(
    data_wait_s: float, workers: int, to_try: str
) -> None:
    summary = summary_of(data_wait=data_wait_s, forward=10 - data_wait_s)

    assert verdict(summary, workers=workers, cores=8).try_ == to_try


def test_nothing_is_tried_without_the_setting_or_the_cores_for_it() -> None:
    waiting = summary_of(data_wait=8.0, forward=2.0)

    assert verdict(waiting).try_ == ""
    assert verdict(waiting, workers=8, cores=8).try_ == ""


def test_a_fifth_of_waiting_is_the_boundary() -> None:
    assert verdict(summary_of(data_wait=2.0, forward=8.0)).bottleneck == "input-bound"
    assert verdict(summary_of(data_wait=1.9, forward=8.1)).bottleneck == "compute-bound"


def test_waiting_while_the_device_has_work_is_no_bottleneck() -> None:
    """A host that runs ahead of its GPU waits for data at no cost."""
    stages = {"data_wait": StageTotal(6.0, 0.1, 0.6), "forward": StageTotal(1.0, 9.0, 0.1)}
    summary = ClockSummary(10, 320, 10.0, stages, 0.0, {}, 0.0, (1.0,) * 10)

    assert verdict(summary).bottleneck == "compute-bound"


def test_the_larger_of_waiting_and_copying_is_named() -> None:
    result = verdict(summary_of(data_wait=2.5, h2d=4.0, forward=3.0))

    assert (result.bottleneck, result.try_) == ("copy-bound", "")
    assert result.evidence == "Copying to the device took 4 s of the 10 s of 10 steps (40%)."


def test_evaluation_that_takes_more_than_all_else_is_made_rarer() -> None:
    summary = summary_of(forward=9.0, evaluate_s=42.0)

    result = verdict(summary, eval_every=Duration(1, "ep"))

    assert result.to_dict() == {
        "bottleneck": "evaluation-bound",
        "evidence": "Evaluation took 42 s of 52 s.",
        "try": "train.eval_every=5ep",
    }
    assert verdict(summary).try_ == ""
    assert verdict(summary_of(forward=9.0, evaluate_s=10.0)).bottleneck == "compute-bound"


def test_all_the_stages_of_computing_count() -> None:
    result = verdict(summary_of(data_wait=1.0, device_augment=1.0, forward=2.0, loss=1.0, backward=3.0, optimizer=1.0))

    assert (result.bottleneck, result.try_) == ("compute-bound", "")
    assert result.evidence == "Computing took 8 s of the 10 s of 10 steps (80%)."


def test_time_outside_every_stage_is_not_called_computing() -> None:
    result = verdict(summary_of(forward=4.0))

    assert result.bottleneck == "unknown"
    assert result.evidence == "What no stage covers took 6 s of the 10 s of 10 steps (60%)."


def test_no_counted_step_is_unknown() -> None:
    seconds = [0.0]
    clock = StageClock(warmup_steps=10, now=lambda: seconds[0])
    empty = clock.drain()
    seconds[0] += 1.0
    clock.end_step(images=1)

    assert verdict(empty).to_dict() == {"bottleneck": "unknown", "evidence": "No step was counted.", "try": ""}
    assert verdict(clock.drain()).try_ == "measure.warmup_steps=0"
