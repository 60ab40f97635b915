"""The study of batches: batch size x warm-up x rule for the learning rate, and how soon whole runs reach a target.

It is what Shallue et al. 2019 (arXiv 1811.03600) call the steps and the time to a goal error: a larger batch makes
epochs faster, and each of them may teach less.
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
"""The rule at the batch size that the learning rate is for: there all of them say the same."""


@dataclass(frozen=True)
class Grid:
    """What is combined with what; an empty axis leaves the recipe's own."""

    batch_sizes: tuple[int, ...] = ()
    warmups: tuple[Duration, ...] = ()
    rules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """A batch size, a warm-up and a rule; `error` says why the recipe does not run so, and `case` is None then."""

    batch_size: int
    warmup: str
    rule: str
    lr: float
    case: Case | None
    error: str = ""

    @property
    def name(self) -> str:
        """What it is called: `batch 512, warmup 5ep, sqrt`."""
        return ", ".join([f"batch {self.batch_size}", *([f"warmup {self.warmup}"] if self.warmup else []), self.rule])


def plan_cells(recipe: Recipe, grid: Grid, ranks: int, nodes: int, length: Patch) -> list[Cell]:
    """Return all combinations, `length` being the patch of a whole run.

    The learning rate of the recipe is taken to be for its `base_batch_size`, or for its batch size where it has none.
    Raise `RecipeError` where no combination fits.
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
    """Yield what a combination changes about the recipe."""
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
        if not warmup.value and not isinstance(recipe.schedule, OneCycle):  # the others have no effect without
            yield from defaults(recipe, "schedule", ("warmup_start", "warmup_shape", "warmup_by"))


def _spoken(recipe: Recipe, warmup: Duration | None) -> str:
    """Return a warm-up as it is written; the recipe's own for None, which is "" where its schedule has none."""
    if warmup is not None:
        return str(warmup)
    return "" if isinstance(recipe.schedule, OneCycle) else str(recipe.schedule.warmup)


def to_batches(
    cells: Sequence[Cell], outcomes: Sequence[Outcome], seeds: int, target: Goal | None
) -> tuple[BatchPoint, ...]:
    """Return how the runs of each combination ended, and when they reached `target`.

    Raise `PacelineError` where the evaluations of a run cannot be read.
    """
    return tuple(
        _batch(cell, [each for each in outcomes if each.trial.name == cell.name], seeds, target) for cell in cells
    )


def sentences_of(cells: Sequence[Cell], outcomes: Sequence[Outcome], target: Goal | None) -> tuple[str, ...]:
    """Return what the best way of each larger batch takes of the time of the smallest batch, where all runs got there.

    The best is the fastest to the target of those whose runs have all reached it. Ratios are of runs of one seed, with
    their interval where there are several.
    """
    best: dict[int, tuple[Cell, dict[int, float]]] = {}
    for cell in cells:
        its = [each for each in outcomes if each.trial.name == cell.name]
        times_s = {turn: reached["trained_s"] for turn, reached in _reached(its, target).items()}
        known = best.get(cell.batch_size)
        if times_s and len(times_s) == len(its) and (known is None or _typical(times_s) < _typical(known[1])):
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
    """Return the evaluation that met the target, by turn, of the runs that did."""
    if target is None:
        return {}
    found = {each.repeat: first_met([*read_lines(each.rundir.evals)], target) for each in outcomes if each.result}
    return {turn: evaluation for turn, evaluation in found.items() if evaluation is not None}


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
    """Return the evaluation that met the target; averaged weights are judged where there are, as where a run stops."""
    judged = [each.get("ema_top1", each["top1"]) for each in evaluations]
    place = target.met_at(judged)
    return None if place is None else evaluations[place]


def _geometric(values: Sequence[float]) -> Interval | None:
    """Return the geometric mean of times or rates, whose ratio to another's is then that of their runs."""
    if len(values) == 1:
        return mean_of(values)  # itself, to the last digit
    return ratio_of(values, [1.0] * len(values)) if values else None
