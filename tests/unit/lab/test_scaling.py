"""Scaling studies: which ranks run with which batch, and the speedups of their runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import RecipeError
from paceline.core.experiments.results import ScalePoint
from paceline.core.results import (
    CommunicationResult,
    EvalResult,
    RunResult,
    StragglerResult,
    ThroughputResult,
    TimeResult,
)
from paceline.core.run_dir import RunDir
from paceline.core.statistics import ratio_interval
from paceline.lab.patches import build_measurement_patch
from paceline.lab.predict.points import ScalingPoint, parse_points
from paceline.lab.scaling import (
    PlannedPoint,
    RankLayout,
    build_scale_points,
    describe_cpu_starvation,
    describe_shared_cores,
    format_points_csv,
    plan_layouts,
    plan_points,
)
from paceline.lab.trial import TrialOutcome, apply_patch
from paceline.recipe.load import Patch, load

from .simulated_machine import starved

RECIPE = load("digits").recipe
SHORT = build_measurement_patch(RECIPE, 20, Patch())


def ended(point: PlannedPoint, turn: int, images_per_s: float, top1: float | None = None) -> TrialOutcome:
    assert point.case is not None
    evaluation = None if top1 is None else EvalResult(images=100, top1=top1, top5=1.0, loss=0.5)
    waits = point.ranks.ranks > 1
    result = RunResult(
        status="completed",
        recipe_hash="ab",
        world_size=point.ranks.ranks,
        epochs=1.0,
        steps=50,
        images_seen=3200,
        eval=evaluation,
        best=evaluation,
        throughput=ThroughputResult(
            images_per_s=images_per_s, spread=(images_per_s - 5, images_per_s + 5), n=4, excluded_s=0
        ),
        time=TimeResult(wall_s=4.0 + turn, startup_s=1.0, train_s=2.0, eval_s=0, checkpoint_s=0, to_target_s=None),
        stages={},
        communication=CommunicationResult(exposed_s=0.001 * turn, share=0.1 * turn) if waits else None,
        straggler=StragglerResult(lost_s=0.001, share=0.05) if waits else None,
        verdict={"bottleneck": "input-bound", "evidence": "none", "try": ""},
        lr="0.1 at 64",
        weights_sha256="ab",
        provenance={},
    )
    return TrialOutcome(
        point.case.in_turn(turn), turn, RunDir(Path(f"scale/trials/{point.ranks.ranks}r-{turn}")), result
    )


def failed(point: PlannedPoint, error: str = "CUDA out of memory") -> TrialOutcome:
    assert point.case is not None
    return TrialOutcome(point.case.in_turn(1), 1, RunDir(Path("x")), None, error, 1)


def planned(mode: str = "weak", ranks: Sequence[int] = (1, 2, 4), seed: int | None = None) -> list[PlannedPoint]:
    return plan_points(RECIPE, mode, plan_layouts(ranks, []), SHORT, seed)


def test_on_one_node_all_numbers_of_ranks_are_measured_and_on_more_the_largest_on_each() -> None:
    assert plan_layouts([4, 1, 2], []) == [RankLayout(1), RankLayout(2), RankLayout(4)]
    assert plan_layouts([1, 2, 4], [4, 1, 2]) == [
        RankLayout(1, 1),
        RankLayout(2, 1),
        RankLayout(4, 1),
        RankLayout(8, 2),
        RankLayout(16, 4),
    ]
    assert plan_layouts([4], [2]) == [RankLayout(8, 2)]
    assert [ranks.ranks_per_node for ranks in (RankLayout(8, 2), RankLayout(3))] == [4, 3]


@pytest.mark.parametrize(("mode", "batch_sizes"), [("weak", [64, 128, 256]), ("strong", [64, 64, 64])])
def test_weak_scaling_keeps_the_batch_of_a_rank_and_strong_the_whole_one(mode: str, batch_sizes: list[int]) -> None:
    recipe = load("digits", Patch((("data.batch_size", 64),))).recipe
    points = plan_points(recipe, mode, plan_layouts([2, 4, 8], []), SHORT, None)
    assert [point.batch_size for point in points] == batch_sizes
    recipes = [apply_patch(recipe, point.case.patch) for point in points if point.case]
    assert [each.data.batch_size for each in recipes] == batch_sizes
    assert {each.train.steps for each in recipes} == {RECIPE.measure.warmup_steps + 20}


def test_ranks_over_which_the_batch_does_not_divide_are_reported_and_the_others_are_measured() -> None:
    points = planned("strong", (1, 3, 4))
    assert [point.case is None for point in points] == [False, True, False]
    outcomes = [ended(points[0], 1, 100.0), ended(points[2], 1, 320.0)]
    found = build_scale_points(points, outcomes)
    assert found[1].error.startswith("data.batch_size: 128 does not divide evenly over 3 ranks")
    assert found[1].images_per_s is None and found[2].error == ""


def test_where_no_number_of_ranks_fits_it_is_an_error() -> None:
    with pytest.raises(RecipeError, match="does not divide evenly over 3 ranks"):
        planned("strong", (3,))
    with pytest.raises(RecipeError, match="does not divide evenly over 3 ranks"):
        planned("weak", (3, 4))


def test_efficiency_is_of_pairs_of_one_turn_and_a_rank() -> None:
    """Turn 2 was slow for both, which does not widen the interval of their ratio."""
    points = planned(ranks=(1, 2))
    rates = {1: (100.0, 50.0), 2: (180.0, 90.0)}
    outcomes = [ended(point, turn, rates[point.ranks.ranks][turn - 1]) for turn in (1, 2) for point in points]
    one, two = build_scale_points(points, outcomes)
    assert one.efficiency is None
    assert two.efficiency == ratio_interval([90.0, 45.0], [100.0, 50.0])
    assert two.efficiency is not None and two.efficiency.n == 2
    assert [each.epoch_s for each in (one, two)] == [3200 / each.images_per_s.value for each in (one, two)]
    assert two.speedup is not None and two.speedup.value == 2 * two.efficiency.value and one.speedup is None
    assert (two.speedup.low, two.speedup.high) == (2 * (two.efficiency.low or 0), 2 * (two.efficiency.high or 0))
    assert two.efficiency.value == pytest.approx(0.9, rel=1e-12)  # rounding of a logarithm
    assert (two.images_per_s.value, two.spread, two.images_per_s.n) == (135.0, (90.0, 180.0), 2)


def test_what_a_step_waits_for_is_the_middle_of_the_runs() -> None:
    points = planned(ranks=(1, 2))
    one, two = build_scale_points(points, [ended(point, turn, 128.0) for turn in (1, 2) for point in points])
    assert (one.exposed_s, one.straggler_share) == (None, None)
    assert two.exposed_s == pytest.approx(0.0015) and two.exposed_share == pytest.approx(0.15)  # a mean of two
    assert (two.straggler_share, two.startup_s, two.wall_s, two.step_s) == (0.05, 1.0, 5.5, 2.0)
    assert (two.ranks, two.nodes, two.batch_size, two.rank_batch) == (2, 1, 256, 128)
    assert (two.runs, two.bottleneck) == (("trials/2r-1", "trials/2r-2"), "input-bound")


def test_a_single_run_has_the_spread_of_its_windows_and_no_interval() -> None:
    points = planned(ranks=(1, 2))
    found = build_scale_points(points, [ended(point, 1, 100.0) for point in points])
    assert found[0].spread == (95.0, 105.0)
    assert found[1].efficiency is not None and (found[1].efficiency.low, found[1].efficiency.n) == (None, 1)


def test_where_the_smallest_failed_the_next_one_is_what_others_are_measured_by() -> None:
    points = planned(ranks=(1, 2, 4))
    found = build_scale_points(points, [failed(points[0]), ended(points[1], 1, 100.0), ended(points[2], 1, 150.0)])
    assert found[0] == ScalePoint(ranks=1, nodes=1, batch_size=128, rank_batch=128, error="CUDA out of memory", runs=())
    assert found[1].efficiency is None
    assert found[2].efficiency is not None and found[2].efficiency.value == pytest.approx(0.75, rel=1e-12)


def test_what_was_measured_is_a_table_to_predict_from() -> None:
    points = planned(ranks=(1, 2, 4))
    found = build_scale_points(points, [ended(points[0], 1, 100.0), failed(points[1]), ended(points[2], 1, 390.5)])
    read = parse_points(format_points_csv(found), "table")
    assert read == (ScalingPoint(1, 1, 128, 100.0, 1.0), ScalingPoint(4, 1, 128, 390.5, 1.0))
    assert format_points_csv(found[1:2]) == ""


def test_accuracy_is_reported_for_whole_runs_only() -> None:
    for seed, expected in ((None, None), (0, 0.75)):
        points = planned(ranks=(1,), seed=seed)
        (found,) = build_scale_points(
            points, [ended(points[0], 1, 100.0, top1=0.5), ended(points[0], 2, 100.0, top1=1.0)]
        )
        assert (found.top1.value if found.top1 else None) == expected


def test_what_accuracy_more_ranks_cost_is_reported_over_the_seeds_of_both() -> None:
    points = planned(ranks=(1, 2), seed=0)
    tops = {1: (0.75, 0.5, 0.5), 2: (0.5, 0.5)}
    outcomes = [
        ended(point, turn, 100.0, top1) for point in points for turn, top1 in enumerate(tops[point.ranks.ranks], 1)
    ]
    one, two = build_scale_points(points, outcomes)
    assert one.top1_gap is None
    assert two.top1_gap is not None and (two.top1_gap.value, two.top1_gap.n) == (-0.125, 2)


def test_a_whole_run_without_counted_steps_has_an_accuracy_and_no_speed() -> None:
    """Efficiency is then over the smallest number of ranks that has one."""
    points = planned(ranks=(1, 2, 4), seed=0)
    outcomes = [ended(points[0], 1, 0.0, 0.5), ended(points[1], 1, 100.0, 0.75), ended(points[2], 1, 150.0, 1.0)]
    one, two, four = build_scale_points(points, outcomes)
    assert (one.images_per_s, one.spread, one.step_s, one.efficiency, one.error) == (None, None, None, None, "")
    assert [found.top1 and found.top1.value for found in (one, two, four)] == [0.5, 0.75, 1.0]
    assert [found.top1_gap and found.top1_gap.value for found in (one, two, four)] == [None, 0.25, 0.5]
    assert two.efficiency is None and four.efficiency is not None
    assert four.efficiency.value == pytest.approx(0.75, rel=1e-12)
    assert one.runs and one.wall_s == 5.0


def test_ranks_that_share_cores_are_cautioned_about() -> None:
    cpu = {"device": "cpu", "logical_cores": 4}
    places = plan_layouts([1, 2], [])
    assert describe_shared_cores(RECIPE.parallel, places, cpu) == (
        "Up to 2 ranks share the 4 cores of a node, so each has fewer than one alone "
        "(set parallel.threads=2 to give each as many)."
    )
    own = load("digits", Patch((("parallel.threads", 2),))).recipe
    assert describe_shared_cores(own.parallel, places, cpu) == ""
    assert "Up to 8 ranks share the 4 cores of a node" in describe_shared_cores(
        own.parallel, plan_layouts([8], [2]), cpu
    )
    assert describe_shared_cores(RECIPE.parallel, plan_layouts([1], [1, 2, 4]), cpu) == ""
    assert describe_shared_cores(RECIPE.parallel, places, {"device": "cuda", "logical_cores": 4}) == ""


def test_speeds_that_others_had_the_cores_for_are_cautioned_about() -> None:
    points = planned()
    outcomes = [ended(point, turn, 100.0 * point.ranks.ranks) for turn in (1, 2) for point in points]
    assert describe_cpu_starvation(outcomes) == ""
    assert outcomes[1].result is not None
    outcomes[1] = replace(outcomes[1], result=starved(outcomes[1].result))
    assert describe_cpu_starvation(outcomes).startswith(
        "Other processes held the cores 62 % of the time in 1 of 6 runs: speeds and"
    )
    assert [point.bottleneck for point in build_scale_points(points, outcomes)] == [
        "input-bound",
        "cpu-starved",
        "input-bound",
    ]
