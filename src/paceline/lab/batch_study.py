"""Batch-size studies: whole runs over batch size x warm-up x learning-rate rule, and their time to a target."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.core.errors import RecipeError
from paceline.core.experiments.results import BatchPoint
from paceline.core.results import epoch_seconds
from paceline.core.run_dir import read_lines
from paceline.core.statistics import Interval, TargetCriterion, mean_interval, ratio_interval
from paceline.core.units import Duration, number
from paceline.lab.patches import reset_to_defaults
from paceline.lab.repeat import RunCase, find_first_error, list_completed_folders, results_by_repeat
from paceline.lab.scaling import compute_mean_top1
from paceline.lab.trial import TrialOutcome, apply_patch
from paceline.recipe.load import Patch
from paceline.recipe.plan import divide_batch, lr_factor
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.optim import OneCycle, ScheduleSection

LR_RULES: Final = ("none", "sqrt", "linear")
ANY_RULE: Final = "any"
"""Rule at the base batch size, where all rules agree."""


@dataclass(frozen=True)
class BatchGrid:
    """Axes of the grid; an empty axis keeps the recipe's value."""

    batch_sizes: tuple[int, ...] = ()
    warmups: tuple[Duration, ...] = ()
    rules: tuple[str, ...] = ()


@dataclass(frozen=True)
class BatchCell:
    """A batch size, LR warm-up and rule; `case` is None, with an `error`, if it cannot run."""

    batch_size: int
    warmup: str
    rule: str
    lr: float
    case: RunCase | None
    error: str = ""

    @property
    def name(self) -> str:
        """Label such as `batch 512, warmup 5ep, sqrt`."""
        return ", ".join([f"batch {self.batch_size}", *([f"warmup {self.warmup}"] if self.warmup else []), self.rule])


def plan_cells(recipe: Recipe, grid: BatchGrid, ranks: int, nodes: int, length: Patch) -> list[BatchCell]:
    """Return all cells; `length` is the patch of a full run. Raise `RecipeError` if none fits.

    The recipe's learning rate refers to its `base_batch_size`, or to its batch size if that is `auto`.
    """
    known = recipe.optim.base_batch_size
    base = recipe.data.global_batch_size if known == "auto" else known
    cells = [
        _plan_cell(recipe, (batch_size, warmup, rule), base, RunCase("", length, ranks, nodes, recipe.seed))
        for batch_size in grid.batch_sizes or (recipe.data.global_batch_size,)
        for warmup in grid.warmups or (None,)
        for rule in _select_rules(grid.rules or (recipe.optim.lr_scaling,), is_base=batch_size == base)
    ]
    if all(cell.case is None for cell in cells):
        raise RecipeError(cells[0].error)
    return cells


def _select_rules(rules: Sequence[str], *, is_base: bool) -> Sequence[str]:
    return (ANY_RULE,) if is_base else rules


def _plan_cell(recipe: Recipe, setting: tuple[int, Duration | None, str], base: int, whole: RunCase) -> BatchCell:
    batch_size, warmup, rule = setting
    assignments = [*whole.patch.assignments, *_iter_assignments(recipe, setting, base)]
    cell = BatchCell(batch_size, _format_warmup(recipe.schedule, warmup), rule, recipe.optim.lr, None)
    try:
        varied = apply_patch(recipe, Patch(tuple(assignments)))
        divide_batch(varied, whole.ranks)
    except RecipeError as error:
        return BatchCell(batch_size, cell.warmup, rule, recipe.optim.lr, None, str(error))
    case = RunCase(cell.name, Patch(tuple(assignments)), whole.ranks, whole.nodes, whole.first_seed)
    return BatchCell(batch_size, cell.warmup, rule, varied.optim.lr * lr_factor(varied.optim, batch_size), case)


def _iter_assignments(
    recipe: Recipe, setting: tuple[int, Duration | None, str], base: int
) -> Iterable[tuple[str, Any]]:
    batch_size, warmup, rule = setting
    if batch_size != recipe.data.global_batch_size:
        yield "data.batch_size", batch_size
    scaling = "none" if rule == ANY_RULE else rule
    if scaling != recipe.optim.lr_scaling:
        yield "optim.lr_scaling", scaling
    wanted = "auto" if scaling == "none" else base
    if wanted != recipe.optim.base_batch_size:
        yield "optim.base_batch_size", wanted
    if warmup is not None and str(warmup) != _format_warmup(recipe.schedule, None):
        yield "schedule.warmup", str(warmup)
        if not warmup.value and not isinstance(recipe.schedule, OneCycle):  # these have no effect without a warm-up
            yield from reset_to_defaults(recipe, "schedule", ("warmup_start", "warmup_shape", "warmup_by"))


def _format_warmup(schedule: ScheduleSection, warmup: Duration | None) -> str:
    if warmup is not None:
        return str(warmup)
    return "" if isinstance(schedule, OneCycle) else str(schedule.warmup)


def build_batch_points(
    cells: Sequence[BatchCell], outcomes: Sequence[TrialOutcome], seeds: int, target: TargetCriterion | None
) -> tuple[BatchPoint, ...]:
    """Return the results of each cell, and when its runs reached `target`.

    Raise `PacelineError` if the evaluations of a run cannot be read.
    """
    return tuple(
        _build_batch_point(cell, [each for each in outcomes if each.trial.name == cell.name], seeds, target)
        for cell in cells
    )


def compare_batches(
    cells: Sequence[BatchCell], outcomes: Sequence[TrialOutcome], target: TargetCriterion | None
) -> tuple[str, ...]:
    """Return a sentence per larger batch size: its time to the target relative to the smallest one's.

    Uses the fastest cell per batch size of those whose runs all reached the target.
    """
    best: dict[int, tuple[BatchCell, dict[int, float]]] = {}
    for cell in cells:
        cell_outcomes = [each for each in outcomes if each.trial.name == cell.name]
        times_s = {
            turn: reached["trained_s"] for turn, reached in _find_target_evaluations(cell_outcomes, target).items()
        }
        # A cell with a run that missed the target has no mean time.
        previous = best.get(cell.batch_size)
        if (
            times_s
            and len(times_s) == len(cell_outcomes)
            and (previous is None or _mean_log_time(times_s) < _mean_log_time(previous[1]))
        ):
            best[cell.batch_size] = (cell, times_s)
    ordered = [best[batch_size] for batch_size in sorted(best)]
    return tuple(_compare_cells(each, ordered[0]) for each in ordered[1:])


def _mean_log_time(times_s: dict[int, float]) -> float:
    return math.fsum(map(math.log, times_s.values())) / len(times_s)


def _compare_cells(one: tuple[BatchCell, dict[int, float]], smallest: tuple[BatchCell, dict[int, float]]) -> str:
    (cell, times_s), (smallest_cell, others_s) = one, smallest
    # Runs of one turn have the same seed, so their ratio has less noise than one of means.
    turns = sorted({*times_s} & {*others_s})
    ratio = ratio_interval([times_s[turn] for turn in turns], [others_s[turn] for turn in turns])
    how = ", ".join([f"rule {cell.rule}", *([f"warm-up {cell.warmup}"] if cell.warmup else [])])
    bounds = "" if ratio.low is None or ratio.high is None else f" ({number(ratio.low)} to {number(ratio.high)})"
    reached = f"batch {cell.batch_size} ({how}) reaches the target in {number(ratio.value)}{bounds}"
    return f"{reached} of the time of batch {smallest_cell.batch_size}"


def _find_target_evaluations(
    outcomes: Sequence[TrialOutcome], target: TargetCriterion | None
) -> dict[int, dict[str, Any]]:
    if target is None:
        return {}
    evaluations = {
        each.repeat: find_target_evaluation([*read_lines(each.rundir.evals)], target)
        for each in outcomes
        if each.result
    }
    return {turn: evaluation for turn, evaluation in evaluations.items() if evaluation is not None}


def _build_batch_point(
    cell: BatchCell, outcomes: Sequence[TrialOutcome], seeds: int, target: TargetCriterion | None
) -> BatchPoint:
    results = list(results_by_repeat(cell.name, outcomes).values())
    reached = _find_target_evaluations(outcomes, target).values()
    images_per_s = _geometric_mean([rate for result in results if (rate := result.throughput.images_per_s) > 0])
    return BatchPoint(
        batch_size=cell.batch_size,
        warmup=cell.warmup,
        lr_rule=cell.rule,
        lr=cell.lr,
        seeds=seeds,
        reached=len(reached),
        top1=compute_mean_top1(results),
        images_per_s=images_per_s,
        epoch_s=epoch_seconds(results, images_per_s),
        to_target_s=_geometric_mean([each["trained_s"] for each in reached]),
        to_target_epochs=_geometric_mean([each["epoch"] for each in reached]),
        error=cell.error or find_first_error(cell.name, outcomes),
        runs=list_completed_folders(cell.name, outcomes),
    )


# Time to a goal error as in Shallue et al. 2019 (arXiv 1811.03600).
def find_target_evaluation(evaluations: Sequence[dict[str, Any]], target: TargetCriterion) -> dict[str, Any] | None:
    """Return the first evaluation that reached the target, of the averaged weights if there are any."""
    values = [each.get("ema_top1", each["top1"]) for each in evaluations]
    index = target.first_reached_at(values)
    return None if index is None else evaluations[index]


def _geometric_mean(values: Sequence[float]) -> Interval | None:
    # Geometric, so that the ratio of two means is the mean ratio of their runs.
    if len(values) == 1:
        return mean_interval(values)  # without rounding by the logarithm
    return ratio_interval(values, [1.0] * len(values)) if values else None
