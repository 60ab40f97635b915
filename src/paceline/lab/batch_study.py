"""The study of batches: batch size x warm-up x rule for the learning rate, and how soon whole runs reach a target.

It is what Shallue et al. 2019 (arXiv 1811.03600) call the steps and the time to a goal error: a larger batch makes
epochs faster, and each of them may teach less.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.core.errors import RecipeError
from paceline.core.experiments.scaling import BatchPoint
from paceline.core.interval import Interval, mean_of
from paceline.core.rundir import read_lines
from paceline.core.units import Duration
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
class Target:
    """A top-1 accuracy, and how many evaluations in a row must reach it."""

    top1: float
    patience: int = 1


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


@dataclass
class _Reached:
    """Seconds and epochs to the target, of the runs that reached it."""

    times_s: list[float] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)


def plan_cells(recipe: Recipe, grid: Grid, ranks: int, nodes: int, length: Patch) -> list[Cell]:
    """Return all combinations, `length` being the patch of a whole run.

    The learning rate of the recipe is taken to be for its `base_batch_size`, or for its batch size where it has none.
    Raise `RecipeError` where no combination fits.
    """
    known = recipe.optim.base_batch_size
    base = recipe.data.batch_size if known == "auto" else known
    cells = [
        _cell(recipe, (batch_size, warmup, rule), base, Case("", length, ranks, nodes, recipe.seed))
        for batch_size in grid.batch_sizes or (recipe.data.batch_size,)
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
    if batch_size != recipe.data.batch_size:
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
            yield from defaults(recipe, "schedule", ("warmup_start", "warmup_shape"))


def _spoken(recipe: Recipe, warmup: Duration | None) -> str:
    """Return a warm-up as it is written; the recipe's own for None, which is "" where its schedule has none."""
    if warmup is not None:
        return str(warmup)
    return "" if isinstance(recipe.schedule, OneCycle) else str(recipe.schedule.warmup)


def to_batches(
    cells: Sequence[Cell], outcomes: Sequence[Outcome], seeds: int, target: Target | None
) -> tuple[BatchPoint, ...]:
    """Return how the runs of each combination ended, and when they reached `target`.

    Raise `PacelineError` where the evaluations of a run cannot be read.
    """
    return tuple(
        _batch(cell, [each for each in outcomes if each.trial.name == cell.name], seeds, target) for cell in cells
    )


def _batch(cell: Cell, outcomes: Sequence[Outcome], seeds: int, target: Target | None) -> BatchPoint:
    results = list(results_of(cell.name, outcomes).values())
    reached = _Reached()
    for outcome in outcomes:
        if outcome.result is None or target is None:
            continue
        first = first_reached(read_lines(outcome.rundir.evals), target)
        if first is not None:
            reached.times_s.append(first["trained_s"])
            reached.epochs.append(first["epoch"])
    return BatchPoint(
        batch_size=cell.batch_size,
        warmup=cell.warmup,
        lr_rule=cell.rule,
        lr=cell.lr,
        seeds=seeds,
        reached=len(reached.times_s),
        top1=top1_of(results),
        images_per_s=_mean([result.throughput.images_per_s for result in results]),
        to_target_s=_mean(reached.times_s),
        to_target_epochs=_mean(reached.epochs),
        error=cell.error or error_of(cell.name, outcomes),
        runs=runs_of(cell.name, outcomes),
    )


def first_reached(evaluations: Iterable[dict[str, Any]], target: Target) -> dict[str, Any] | None:
    """Return the evaluation that met the target: the last of the first `patience` in a row to reach it; else None.

    As where a run is to stop at it, the averaged weights are judged when there are any.
    """
    hits = 0
    for evaluation in evaluations:
        hits = hits + 1 if evaluation.get("ema_top1", evaluation["top1"]) >= target.top1 else 0
        if hits == target.patience:
            return evaluation
    return None


def _mean(values: Sequence[float]) -> Interval | None:
    return mean_of(values) if values else None
