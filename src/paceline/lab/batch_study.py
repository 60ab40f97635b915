"""Batch-size studies: whole runs over batch size x warm-up x learning-rate rule, and their time to a target.

Steps and time to a goal error as in Shallue et al. 2019 (arXiv 1811.03600).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.core.errors import RecipeError
from paceline.core.experiments.scaling import BatchPoint
from paceline.core.goal import Goal
from paceline.core.interval import Interval, mean_of, ratio_of
from paceline.core.results import epoch_s_of
from paceline.core.rundir import read_lines
from paceline.core.units import Duration, number
from paceline.lab.measuring import defaults
from paceline.lab.scaling import top1_of
from paceline.lab.trial import Outcome, vary
from paceline.lab.turns import Case, error_of, results_of, runs_of
from paceline.recipe.patch import Patch
from paceline.recipe.plan import divide_batch, lr_factor
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.schedule import OneCycle

RULES: Final = ("none", "sqrt", "linear")
ANY: Final = "any"
"""Rule at the base batch size, where all rules agree."""


@dataclass(frozen=True)
class Grid:
    """Axes of the grid; an empty axis keeps the recipe's value."""

    batch_sizes: tuple[int, ...] = ()
    warmups: tuple[Duration, ...] = ()
    rules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """A batch size, LR warm-up and rule; `error` explains a cell that cannot run, whose `case` is None."""

    batch_size: int
    warmup: str
    rule: str
    lr: float
    case: Case | None
    error: str = ""

    @property
    def name(self) -> str:
        """Label such as `batch 512, warmup 5ep, sqrt`."""
        return ", ".join([f"batch {self.batch_size}", *([f"warmup {self.warmup}"] if self.warmup else []), self.rule])


def plan_cells(recipe: Recipe, grid: Grid, ranks: int, nodes: int, length: Patch) -> list[Cell]:
    """Return all cells; `length` is the patch of a full run. Raise `RecipeError` if none fits.

    The recipe's learning rate refers to its `base_batch_size`, or to its batch size if that is `auto`.
    """
    known = recipe.optim.base_batch_size
    base = recipe.data.global_batch_size if known == "auto" else known
    cells = [
        _cell(recipe, (batch_size, warmup, rule), base, Case("", length, ranks, nodes, recipe.seed))
        for batch_size in grid.batch_sizes or (recipe.data.global_batch_size,)
        for warmup in grid.warmups or (None,)
        for rule in _rules(grid.rules or (recipe.optim.lr_scaling,), is_base=batch_size == base)
    ]
    if all(cell.case is None for cell in cells):
        raise RecipeError(cells[0].error)
    return cells


def _rules(rules: Sequence[str], *, is_base: bool) -> Sequence[str]:
    return (ANY,) if is_base else rules


def _cell(recipe: Recipe, setting: tuple[int, Duration | None, str], base: int, whole: Case) -> Cell:
    batch_size, warmup, rule = setting
    assignments = [*whole.patch.assignments, *_assignments(recipe, setting, base)]
    cell = Cell(batch_size, _spoken(recipe, warmup), rule, recipe.optim.lr, None)
    try:
        varied = vary(recipe, Patch(tuple(assignments)))
        divide_batch(varied, whole.ranks)
    except RecipeError as error:
        return Cell(batch_size, cell.warmup, rule, recipe.optim.lr, None, str(error))
    case = Case(cell.name, Patch(tuple(assignments)), whole.ranks, whole.nodes, whole.first_seed)
    return Cell(batch_size, cell.warmup, rule, varied.optim.lr * lr_factor(varied), case)


def _assignments(recipe: Recipe, setting: tuple[int, Duration | None, str], base: int) -> Iterable[tuple[str, Any]]:
    batch_size, warmup, rule = setting
    if batch_size != recipe.data.global_batch_size:
        yield "data.batch_size", batch_size
    scaling = "none" if rule == ANY else rule
    if scaling != recipe.optim.lr_scaling:
        yield "optim.lr_scaling", scaling
    wanted = "auto" if scaling == "none" else base
    if wanted != recipe.optim.base_batch_size:
        yield "optim.base_batch_size", wanted
    if warmup is not None and str(warmup) != _spoken(recipe, None):
        yield "schedule.warmup", str(warmup)
        if not warmup.value and not isinstance(recipe.schedule, OneCycle):  # these have no effect without a warm-up
            yield from defaults(recipe, "schedule", ("warmup_start", "warmup_shape", "warmup_by"))


def _spoken(recipe: Recipe, warmup: Duration | None) -> str:
    """Return a warm-up as text; for None the recipe's own, "" if its schedule has none."""
    if warmup is not None:
        return str(warmup)
    return "" if isinstance(recipe.schedule, OneCycle) else str(recipe.schedule.warmup)


def to_batches(
    cells: Sequence[Cell], outcomes: Sequence[Outcome], seeds: int, target: Goal | None
) -> tuple[BatchPoint, ...]:
    """Return how the runs of each cell ended, and when they reached `target`.

    Raise `PacelineError` if the evaluations of a run cannot be read.
    """
    return tuple(
        _batch(cell, [each for each in outcomes if each.trial.name == cell.name], seeds, target) for cell in cells
    )


def sentences_of(cells: Sequence[Cell], outcomes: Sequence[Outcome], target: Goal | None) -> tuple[str, ...]:
    """Return, for each larger batch size, its time to the target relative to the smallest one's.

    Uses the fastest cell per batch size of those whose runs all reached the target. Ratios pair runs of the same seed.
    """
    best: dict[int, tuple[Cell, dict[int, float]]] = {}
    for cell in cells:
        cell_outcomes = [each for each in outcomes if each.trial.name == cell.name]
        times_s = {turn: reached["trained_s"] for turn, reached in _reached(cell_outcomes, target).items()}
        previous = best.get(cell.batch_size)
        if (
            times_s
            and len(times_s) == len(cell_outcomes)
            and (previous is None or _typical(times_s) < _typical(previous[1]))
        ):
            best[cell.batch_size] = (cell, times_s)
    ordered = [best[batch_size] for batch_size in sorted(best)]
    return tuple(_sentence(each, ordered[0]) for each in ordered[1:])


def _typical(times_s: dict[int, float]) -> float:
    return math.fsum(map(math.log, times_s.values())) / len(times_s)


def _sentence(one: tuple[Cell, dict[int, float]], smallest: tuple[Cell, dict[int, float]]) -> str:
    (cell, times_s), (smallest_cell, others_s) = one, smallest
    turns = sorted({*times_s} & {*others_s})
    ratio = ratio_of([times_s[turn] for turn in turns], [others_s[turn] for turn in turns])
    how = ", ".join([f"rule {cell.rule}", *([f"warm-up {cell.warmup}"] if cell.warmup else [])])
    bounds = "" if ratio.low is None or ratio.high is None else f" ({number(ratio.low)} to {number(ratio.high)})"
    reached = f"batch {cell.batch_size} ({how}) reaches the target in {number(ratio.value)}{bounds}"
    return f"{reached} of the time of batch {smallest_cell.batch_size}"


def _reached(outcomes: Sequence[Outcome], target: Goal | None) -> dict[int, dict[str, Any]]:
    """Return the evaluation that reached the target, by turn, of the runs that did."""
    if target is None:
        return {}
    evaluations = {each.repeat: first_met([*read_lines(each.rundir.evals)], target) for each in outcomes if each.result}
    return {turn: evaluation for turn, evaluation in evaluations.items() if evaluation is not None}


def _batch(cell: Cell, outcomes: Sequence[Outcome], seeds: int, target: Goal | None) -> BatchPoint:
    results = list(results_of(cell.name, outcomes).values())
    reached = _reached(outcomes, target).values()
    images_per_s = _geometric([rate for result in results if (rate := result.throughput.images_per_s) > 0])
    return BatchPoint(
        batch_size=cell.batch_size,
        warmup=cell.warmup,
        lr_rule=cell.rule,
        lr=cell.lr,
        seeds=seeds,
        reached=len(reached),
        top1=top1_of(results),
        images_per_s=images_per_s,
        epoch_s=epoch_s_of(results, images_per_s),
        to_target_s=_geometric([each["trained_s"] for each in reached]),
        to_target_epochs=_geometric([each["epoch"] for each in reached]),
        error=cell.error or error_of(cell.name, outcomes),
        runs=runs_of(cell.name, outcomes),
    )


def first_met(evaluations: Sequence[dict[str, Any]], target: Goal) -> dict[str, Any] | None:
    """Return the first evaluation that reached the target, of the averaged weights if there are any."""
    values = [each.get("ema_top1", each["top1"]) for each in evaluations]
    index = target.met_at(values)
    return None if index is None else evaluations[index]


def _geometric(values: Sequence[float]) -> Interval | None:
    """Return the geometric mean, whose ratio to another one is the ratio of their runs."""
    if len(values) == 1:
        return mean_of(values)  # exact
    return ratio_of(values, [1.0] * len(values)) if values else None
