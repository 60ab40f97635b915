"""A sweep: its values, their measurements, and values that are not distinguishable from the fastest."""

from pathlib import Path

import pytest

from paceline.core.errors import RecipeError
from paceline.core.results import AccountResult, CpuResult, RunResult, StageResult, ThroughputResult, TimeResult
from paceline.core.run_dir import RunDir
from paceline.lab.sweep import build_sweep, build_sweep_points, summarize_sweep
from paceline.lab.trial import TrialOutcome
from paceline.recipe.load import Patch, load

RECIPE = load("digits", Patch.parse(["data.batch_size=64"])).recipe


def result(rate: float, spread: tuple[float, float], batch: int, starved: bool = False) -> RunResult:
    """Return a run of 20 steps, of which 10 count, each of which waited 2 ms for data."""
    step_s = batch / rate
    account = {"wall_s": 9.0, "start_up_s": 1.0, "compile_s": 0.0, "warmup_s": 1.0, "stages_s": 10 * step_s}
    cpu = CpuResult(
        rank=0, cores=2, ranks=1, threads=2, wall_s=1.0, run_s=1.0, waited_s=1.0, lost_s=0.5, share=0.25, own_share=0.0,
        throttled_share=0.0, others_cores=1.0, pressure=0.5, switches=9,
    )  # fmt: skip
    return RunResult(
        status="completed", recipe_hash="ab", world_size=1, epochs=20 * batch / 1280, steps=20, images_seen=20 * batch,
        eval=None, best=None, throughput=ThroughputResult(images_per_s=rate, spread=spread, n=4, excluded_s=0),
        time=TimeResult(wall_s=9.0, startup_s=1.0, train_s=2.0, eval_s=0, checkpoint_s=0, to_target_s=None),
        stages={"data_wait": StageResult(host_s=0.02, device_s=0.02, share=0.1),
                "forward": StageResult(host_s=0.1, device_s=10 * step_s - 0.02, share=0.9)},
        account=AccountResult(**account, counted_steps=10, pauses={}, finish_s=0.0, residual_s=0.0, explained=1.0),
        verdict={"bottleneck": "cpu-starved" if starved else "input-bound", "evidence": "", "ceiling": "", "try": ""},
        cpu=cpu if starved else None, lr="0.1", weights_sha256="ab", provenance={},
    )  # fmt: skip


def outcomes(sweep, *found) -> list[TrialOutcome]:
    return [
        TrialOutcome(
            trial, turn, RunDir(Path(f"runs/x/trials/{trial.name}-{turn}")), *(each if each else (None, "no room"))
        )
        for turn, row in enumerate(found, start=1)
        for trial, each in zip(sweep.trials, row, strict=True)
    ]


def test_a_value_has_its_speed_its_stages_and_the_seconds_of_an_epoch() -> None:
    sweep = build_sweep(["data.batch_size=64,128"], RECIPE, 1, 1)
    assert [trial.name for trial in sweep.trials] == ["data.batch_size=64", "data.batch_size=128"]
    runs = outcomes(sweep, [(result(640.0, (600.0, 650.0), 64),), (result(1280.0, (1200.0, 1300.0), 128),)])
    points = build_sweep_points(sweep.trials, runs)
    assert [(each.value, each.batch_size, each.step_s, each.epoch_s) for each in points] == [
        ("64", 64, 0.1, 2.0), ("128", 128, 0.1, 1.0),
    ]  # fmt: skip
    assert [each.data_wait_s for each in points] == [0.002, 0.002]
    assert [sum(each.stages.values()) for each in points] == pytest.approx([0.1, 0.1])
    assert [each.is_fastest for each in points] == [False, True]
    assert points[1].runs == ("trials/data.batch_size=128-1",) and points[1].bottleneck == "input-bound"
    assert summarize_sweep(points) == ("128", "128 is the fastest, 1,280 images/s.")


def test_a_batch_per_rank_is_run_as_the_batch_of_all_ranks() -> None:
    sweep = build_sweep(["data.rank_batch_size=32,64"], RECIPE, 2, 1)
    assert [(trial.name, trial.patch.assignments) for trial in sweep.trials] == [
        ("data.rank_batch_size=32", (("data.batch_size", 64),)),
        ("data.rank_batch_size=64", (("data.batch_size", 128),)),
    ]


def test_a_value_whose_spread_overlaps_is_not_distinguished_from_the_fastest() -> None:
    sweep = build_sweep(["data.workers=0,2,4"], RECIPE, 1, 2)
    rates = [[(100.0,), (300.0,), (310.0,)], [(110.0,), (305.0,), (302.0,)]]
    runs = outcomes(sweep, *([(result(rate, (rate, rate), 64),) for (rate,) in row] for row in rates))
    points = build_sweep_points(sweep.trials, runs)
    assert [each.spread for each in points] == [(100.0, 110.0), (300.0, 305.0), (302.0, 310.0)]
    assert [each.is_fastest for each in points] == [False, True, True]
    assert summarize_sweep(points)[1] == "4 is the fastest, 306 images/s; not distinguishable from it: 2."


def test_one_window_of_one_run_has_no_spread() -> None:
    sweep = build_sweep(["data.workers=0,2"], RECIPE, 1, 1)
    short = [result(rate, (rate, rate), 64) for rate in (100.0, 101.0)]
    alone = [each.model_copy(update={"throughput": each.throughput.model_copy(update={"n": 1})}) for each in short]
    points = build_sweep_points(sweep.trials, outcomes(sweep, [(each,) for each in alone]))
    assert [(each.spread, each.is_fastest) for each in points] == [(None, False), (None, True)]


def test_a_value_that_failed_states_why_and_starved_runs_are_a_caution() -> None:
    sweep = build_sweep(["data.batch_size=64,128"], RECIPE, 1, 1)
    points = build_sweep_points(
        sweep.trials, outcomes(sweep, [(result(640.0, (600.0, 650.0), 64, starved=True),), None])
    )
    assert (points[1].error, points[1].images_per_s, points[1].is_fastest) == ("no room", None, False)
    value, sentence = summarize_sweep(points)
    assert value == "64" and "held the cores" in sentence and "run it again" in sentence
    assert summarize_sweep(points[1:]) == ("", "Nothing could be measured.")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.workers=1,2", "data.batch_size=64"], "--vary: 2 fields at once (vary one in each profile"),
        (["data.workers"], "--vary: 'data.workers' lists no values (write KEY=V1,V2"),
        (["train.steps=10,20"], "--vary: train.steps is set or skipped by a profile"),
        (["schedule.warmup=0ep,1ep"], "--vary: schedule.warmup is set or skipped by a profile"),
        (["optim.lr=0.1,0.2"], "--vary: optim.lr does not change how long a step takes"),
        (["data.workers=2,2"], "--vary: data.workers=2 is given twice"),
        (["data.workers=-1"], "data.workers"),
        (["data.batch_size=63"], "63 does not divide evenly over 2 ranks"),
    ],
)
def test_what_cannot_be_compared_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as raised:
        build_sweep(words, RECIPE, 2, 1)
    assert said in str(raised.value)
