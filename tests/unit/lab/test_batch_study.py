"""Batch-size studies: the combinations they run, and when full runs reached a target."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import RecipeError
from paceline.core.results import EvalResult, RunResult, ThroughputResult, TimeResult
from paceline.core.run_dir import RunDir
from paceline.core.statistics import TargetCriterion, ratio_interval
from paceline.core.units import Duration, number
from paceline.lab.repeat import build_full_run_patch
from paceline.lab.scaling import (
    BatchCell,
    BatchGrid,
    build_batch_points,
    compare_batches,
    find_target_evaluation,
    plan_cells,
)
from paceline.lab.trial import TrialOutcome, apply_patch
from paceline.recipe.load import Patch, load
from paceline.recipe.schema import Recipe

NOTHING = Patch()


def digits(**settings: Any) -> Recipe:
    return load("digits", Patch(tuple((path.replace("__", "."), value) for path, value in settings.items()))).recipe


def varied(recipe: Recipe, cell: BatchCell) -> Recipe:
    assert cell.case is not None
    return apply_patch(recipe, cell.case.patch)


def evaluations(*accuracies: float) -> list[dict[str, float]]:
    return [{"epoch": float(n), "trained_s": 10.0 * n, "top1": each} for n, each in enumerate(accuracies, start=1)]


def ended(cell: BatchCell, turn: int, folder: Path, *accuracies: float, images_per_s: float = 100.0) -> TrialOutcome:
    assert cell.case is not None
    rundir = RunDir(folder / "trials" / f"{cell.batch_size}-{turn}")
    rundir.path.mkdir(parents=True)
    rundir.evals.write_text("".join(json.dumps(each) + "\n" for each in evaluations(*accuracies)))
    evaluation = EvalResult(images=100, top1=accuracies[-1], top5=1.0, loss=0.5)
    result = RunResult(
        status="completed",
        recipe_hash="ab",
        world_size=1,
        epochs=3.0,
        steps=50,
        images_seen=3200,
        eval=evaluation,
        best=evaluation,
        throughput=ThroughputResult(images_per_s=images_per_s * turn, spread=(1.0, 2.0), n=4, excluded_s=0),
        time=TimeResult(wall_s=4.0, startup_s=1.0, train_s=2.0, eval_s=0, checkpoint_s=0, to_target_s=None),
        stages={},
        verdict={"bottleneck": "none", "evidence": "none", "try": ""},
        lr="0.1 at 64",
        weights_sha256="ab",
        provenance={},
    )
    return TrialOutcome(cell.case.in_turn(turn), turn, rundir, result)


def test_all_combinations_are_run_but_rules_that_are_equivalent() -> None:
    grid = BatchGrid((128, 512), (Duration(0, "ep"), Duration(4, "ep")), ("none", "sqrt", "linear"))
    cells = plan_cells(digits(), grid, 1, 0, NOTHING)
    assert [(cell.batch_size, cell.warmup, cell.rule) for cell in cells] == [
        *((128, warmup, "any") for warmup in ("0ep", "4ep")),
        *((512, warmup, rule) for warmup in ("0ep", "4ep") for rule in ("none", "sqrt", "linear")),
    ]
    assert [cell.lr for cell in cells] == pytest.approx([0.1, 0.1, *(0.1, 0.2, 0.4) * 2])  # rounding of a product
    recipes = [varied(digits(), cell) for cell in cells]
    assert [(each.data.batch_size, str(each.schedule.warmup), each.optim.lr_scaling) for each in recipes] == [
        (128, "0ep", "none"),
        (128, "4ep", "none"),
        *((512, warmup, rule) for warmup in ("0ep", "4ep") for rule in ("none", "sqrt", "linear")),
    ]
    assert len({each.hash for each in recipes}) == len(cells)
    assert len({cell.name for cell in cells}) == len(cells)


def test_the_batch_size_that_a_rate_is_for_is_the_recipes_word() -> None:
    recipe = digits(optim__lr_scaling="linear", optim__base_batch_size=256)
    small, base, large = plan_cells(recipe, BatchGrid((128, 256, 512)), 1, 0, NOTHING)
    assert [cell.rule for cell in (small, base, large)] == ["linear", "any", "linear"]
    assert [cell.lr for cell in (small, base, large)] == pytest.approx([0.05, 0.1, 0.2])
    assert varied(recipe, large).optim.base_batch_size == 256


def test_an_axis_that_was_not_requested_is_the_recipes_own() -> None:
    (cell,) = plan_cells(digits(), BatchGrid(rules=("sqrt",)), 1, 0, NOTHING)
    assert (cell.batch_size, cell.warmup) == (128, "2ep")
    (cell,) = plan_cells(digits(schedule__name="one_cycle"), BatchGrid((128,)), 1, 0, NOTHING)
    assert (cell.warmup, cell.name) == ("", "batch 128, any")


def test_without_warmup_what_shapes_one_goes_too() -> None:
    shape = {"warmup_start": 0.1, "warmup_shape": "exponential", "warmup_by": "epoch"}
    recipe = digits(**{f"schedule__{field}": value for field, value in shape.items()})
    (cell,) = plan_cells(recipe, BatchGrid(warmups=(Duration(0, "ep"),)), 1, 0, NOTHING)
    schedule = varied(recipe, cell).schedule
    assert (schedule.warmup.value, schedule.warmup_start, schedule.warmup_shape) == (0, 0, "linear")
    assert schedule.warmup_by == "step"


def test_what_does_not_fit_is_reported_and_the_others_are_run() -> None:
    fits, odd = plan_cells(digits(), BatchGrid((128, 130)), 4, 0, NOTHING)
    assert fits.case is not None and odd.case is None
    assert odd.error.startswith("data.batch_size: 130 does not divide evenly over 4 ranks")
    assert build_batch_points([odd], [], 3, None)[0].error == odd.error
    with pytest.raises(RecipeError, match=r"^schedule\.warmup: "):
        plan_cells(digits(schedule__name="one_cycle"), BatchGrid(warmups=(Duration(4, "ep"),)), 1, 0, NOTHING)


def test_averaged_weights_are_evaluated_where_there_are_any() -> None:
    seen = [{**each, "ema_top1": each["top1"] - 0.2} for each in evaluations(0.8, 0.9, 1.0)]
    assert find_target_evaluation(seen, TargetCriterion(0.8)) == seen[2]


def test_time_and_epochs_to_the_target_are_of_the_runs_that_reached_it(tmp_path: Path) -> None:
    recipe = digits()
    small, large = plan_cells(recipe, BatchGrid((128, 512)), 1, 0, build_full_run_patch(recipe, NOTHING))
    outcomes = [
        ended(small, 1, tmp_path, 0.5, 0.9, 0.9),
        ended(small, 2, tmp_path, 0.5, 0.7, 0.8),
        ended(small, 3, tmp_path, 0.5, 0.6, 0.7),
        TrialOutcome(large.case.in_turn(1), 1, RunDir(tmp_path), None, "the loss is nan", 3),
        ended(large, 2, tmp_path, 0.5, 0.6, 0.6),
    ]
    first, second = build_batch_points([small, large], outcomes, 3, TargetCriterion(0.8))
    assert (first.reached, first.seeds, first.error) == (2, 3, "")
    assert first.to_target_s is not None and first.to_target_s.n == 2
    assert first.to_target_s.value == pytest.approx(math.sqrt(20 * 30))  # means of times and rates are geometric
    assert first.to_target_epochs is not None and first.to_target_epochs.value == pytest.approx(math.sqrt(2 * 3))
    assert first.top1 is not None and first.top1.value == pytest.approx(0.8)  # a mean of three
    assert first.images_per_s is not None and first.images_per_s.value == pytest.approx(6 ** (1 / 3) * 100)
    assert first.epoch_s is not None and first.epoch_s == 3200 / 3.0 / first.images_per_s.value
    assert first.runs == ("trials/128-1", "trials/128-2", "trials/128-3")
    assert (second.reached, second.to_target_s, second.error) == (0, None, "the loss is nan")
    assert second.top1 is not None and second.top1.n == 1


def test_runs_without_counted_steps_reach_a_target_too(tmp_path: Path) -> None:
    (cell,) = plan_cells(digits(), BatchGrid((128,)), 1, 0, NOTHING)
    (found,) = build_batch_points(
        [cell], [ended(cell, 1, tmp_path, 0.5, 0.9, images_per_s=0.0)], 1, TargetCriterion(0.8)
    )
    assert found.images_per_s is None and found.error == ""
    assert found.top1 is not None and found.top1.value == 0.9
    assert found.to_target_s is not None and found.to_target_s.value == 20.0


def test_without_a_target_none_is_reached(tmp_path: Path) -> None:
    (cell,) = plan_cells(digits(), BatchGrid((128,)), 1, 0, NOTHING)
    (found,) = build_batch_points([cell], [ended(cell, 1, tmp_path, 0.9)], 1, None)
    assert (found.reached, found.to_target_s) == (0, None)


def test_what_a_larger_batch_takes_is_reported_of_the_fastest_whose_runs_all_got_there(tmp_path: Path) -> None:
    recipe = digits()
    grid = BatchGrid((128, 512), rules=("none", "sqrt", "linear"))
    small, partly, soon, late = plan_cells(recipe, grid, 1, 0, build_full_run_patch(recipe, NOTHING))
    reached = {  # epochs to the target in two turns; of `partly` in the second alone
        small: ((0.5, 0.5, 0.5, 0.9), (0.5, 0.5, 0.9)),
        partly: ((0.5, 0.5), (0.9, 0.9)),
        soon: ((0.5, 0.9), (0.9, 0.9)),
        late: ((0.5, 0.5, 0.9), (0.5, 0.9)),
    }
    outcomes = [
        ended(cell, turn, tmp_path / cell.rule, *seen)
        for cell, turns in reached.items()
        for turn, seen in enumerate(turns, start=1)
    ]
    (said,) = compare_batches([small, partly, soon, late], outcomes, TargetCriterion(0.8))
    ratio = ratio_interval([2, 1], [4, 3])
    assert ratio.low is not None and ratio.high is not None
    bounds = f"{number(ratio.value)} ({number(ratio.low)} to {number(ratio.high)})"
    assert said == f"batch 512 (rule sqrt, warm-up 2ep) reaches the target in {bounds} of the time of batch 128"
    assert compare_batches([small, partly], outcomes, TargetCriterion(0.8)) == ()
    assert compare_batches([small, soon], outcomes, None) == ()
