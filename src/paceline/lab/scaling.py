"""Studies over numbers of ranks, and over batch size, warm-up and learning-rate rule: plan and evaluate their runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean, median
from typing import Any, Final, Literal

from paceline.core.errors import RecipeError
from paceline.core.experiments.results import BatchPoint, ScalePoint
from paceline.core.results import CPU_STARVED, RunResult, epoch_seconds, starved_note, throughput_spread
from paceline.core.run_dir import read_lines
from paceline.core.statistics import Interval, TargetCriterion, mean_interval, ratio_interval
from paceline.core.units import Duration, count, number
from paceline.lab.patches import Assignment, drop_unchanged_settings, reset_to_defaults
from paceline.lab.predict.points import POINT_COLUMNS
from paceline.lab.repeat import collect_runs
from paceline.lab.trial import Trial, TrialOutcome, apply_patch
from paceline.recipe.load import Patch
from paceline.recipe.plan import divide_batch, lr_factor
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.optim import OneCycle, RangeTest, ScheduleSection
from paceline.recipe.schema.train import Parallel

ScalingMode = Literal["weak", "strong"]
"""Weak scaling keeps the batch size per rank, strong scaling the global batch size.

Gustafson 1988, doi 10.1145/42411.42415; Amdahl 1967, doi 10.1145/1465482.1465560.
"""
LR_RULES: Final = ("none", "sqrt", "linear")
ANY_RULE: Final = "any"
"""Rule at the base batch size, where all rules agree."""


@dataclass(frozen=True)
class RankLayout:
    """A number of ranks in all, evenly distributed over `nodes` nodes of an allocation (0: this machine)."""

    ranks: int
    nodes: int = 0

    @property
    def ranks_per_node(self) -> int:
        """Ranks per node."""
        return self.ranks // max(1, self.nodes)

    @property
    def name(self) -> str:
        """Label such as `8 ranks on 2 nodes`."""
        return count(self.ranks, "rank") + (f" on {count(self.nodes, 'node')}" if self.nodes else "")


@dataclass(frozen=True)
class PlannedPoint:
    """Ranks and their global batch size; `case` is None, with an `error`, if the point cannot run."""

    ranks: RankLayout
    batch_size: int
    case: Trial | None
    error: str = ""


def plan_layouts(ranks_on_node: Sequence[int], nodes: Sequence[int]) -> list[RankLayout]:
    """Return the layouts to measure: each number of ranks on one node, and the largest on several nodes."""
    if not nodes:
        return [RankLayout(ranks) for ranks in sorted({*ranks_on_node})]
    # Points on one node show the cost of ranks sharing a node, the others that of the network.
    on_one_node = [RankLayout(ranks, 1) for ranks in sorted({*ranks_on_node})] if 1 in nodes else []
    return [*on_one_node, *(RankLayout(max(ranks_on_node) * num, num) for num in sorted({*nodes}) if num > 1)]


def plan_points(
    recipe: Recipe, mode: ScalingMode, layouts: Sequence[RankLayout], length: Patch, first_seed: int | None
) -> list[PlannedPoint]:
    """Return a point for each of `layouts`; `length` is the patch of a short or a full run.

    The smallest number of ranks has the recipe's batch size; weak scaling keeps its size per rank. Raise `RecipeError`
    if no point fits, or the smallest does not.
    """
    smallest = min(layout.ranks for layout in layouts)
    if mode == "weak":
        divide_batch(recipe, smallest)
    rank_batch = recipe.data.global_batch_size // smallest
    planned = []
    for layout in layouts:
        batch_size = rank_batch * layout.ranks if mode == "weak" else recipe.data.global_batch_size
        batch = (("data.batch_size", batch_size),) if batch_size != recipe.data.global_batch_size else ()
        patch = Patch((*length.assignments, *batch))
        try:
            divide_batch(apply_patch(recipe, patch), layout.ranks)
        except RecipeError as error:  # this number of ranks does not divide the batch; others may
            planned.append(PlannedPoint(layout, batch_size, None, str(error)))
        else:
            case = Trial(layout.name, patch, ranks=layout.ranks, nodes=layout.nodes, first_seed=first_seed)
            planned.append(PlannedPoint(layout, batch_size, case))
    if all(point.case is None for point in planned):
        raise RecipeError(planned[0].error)
    return planned


def build_scale_points(planned: Sequence[PlannedPoint], outcomes: Sequence[TrialOutcome]) -> tuple[ScalePoint, ...]:
    """Return the measurement of each point, with efficiency and accuracy relative to the smallest measured one."""
    runs = {point.ranks: collect_runs(point.ranks.name, outcomes) for point in planned}
    measured = {ranks: each.results for ranks, each in runs.items() if each.results}
    # A full run with few steps may have no measured steps, and so no speed.
    speeds = {ranks: _get_rank_speeds(results, ranks.ranks) for ranks, results in measured.items()}
    base = min(measured, key=lambda ranks: ranks.ranks, default=None)
    base_of_speed = min((ranks for ranks in speeds if speeds[ranks]), key=lambda ranks: ranks.ranks, default=None)
    points = []
    for point in planned:
        ranks, fields = point.ranks, dict[str, Any]()
        if ranks in measured:
            fields |= _summarize_runs(list(measured[ranks].values()), point)
        if ranks in measured and base_of_speed not in (None, ranks):
            fields["efficiency"] = _compute_efficiency(speeds[ranks], speeds[base_of_speed])
            fields["speedup"] = _scale_interval(fields["efficiency"], ranks.ranks)
        if ranks in measured and base not in (None, ranks) and _is_full_run(point):
            fields["top1_gap"] = _compute_top1_gap(measured[ranks], measured[base])
        points.append(
            ScalePoint(
                ranks=ranks.ranks,
                nodes=max(1, ranks.nodes),
                batch_size=point.batch_size,
                rank_batch=point.batch_size // ranks.ranks,
                error=point.error or runs[ranks].error,
                runs=runs[ranks].folders,
                **fields,
            )
        )
    return tuple(points)


def _get_rank_speeds(results: Mapping[int, RunResult], ranks: int) -> dict[int, float]:
    """Return the images/s per rank of each turn that measured steps."""
    rates = {turn: result.throughput.images_per_s for turn, result in results.items()}
    return {turn: rate / ranks for turn, rate in rates.items() if rate > 0}


def _summarize_runs(results: Sequence[RunResult], point: PlannedPoint) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "startup_s": median(result.time.startup_s for result in results),
        "wall_s": median(result.time.wall_s for result in results),
        "top1": compute_mean_top1(results) if _is_full_run(point) else None,
    }
    timed = [result for result in results if result.throughput.images_per_s > 0]
    if not timed:
        return fields
    rates = [result.throughput.images_per_s for result in timed]
    waits = [result.communication for result in timed if result.communication is not None]
    stragglers = [result.straggler.share for result in timed if result.straggler is not None]
    return fields | {
        "images_per_s": mean_interval(rates),
        "spread": throughput_spread(timed),
        "step_s": median(point.batch_size / rate for rate in rates),
        "epoch_s": epoch_seconds(timed, mean_interval(rates)),
        "exposed_s": median(each.exposed_s for each in waits) if waits else None,
        "exposed_share": median(each.share for each in waits) if waits else None,
        "straggler_share": median(stragglers) if stragglers else None,
        "bottleneck": CPU_STARVED if starved_note(timed) else timed[0].verdict.get("bottleneck", ""),
    }


def _scale_interval(interval: Interval | None, factor: float) -> Interval | None:
    if interval is None:
        return None
    low, high = (None if each is None else factor * each for each in (interval.low, interval.high))
    return Interval(value=factor * interval.value, low=low, high=high, n=interval.n)


def describe_cpu_starvation(outcomes: Sequence[TrialOutcome]) -> str:
    """Return a warning that other processes used the cores, or ""."""
    note = starved_note(outcome.result for outcome in outcomes if outcome.result is not None)
    what = "speeds and efficiencies are not those of the recipe (run it again)."
    return f"{note[0].upper()}{note[1:]}: {what}" if note else ""


def _is_full_run(point: PlannedPoint) -> bool:
    return point.case is not None and point.case.first_seed is not None


def compute_mean_top1(results: Sequence[RunResult]) -> Interval | None:
    """Return the final accuracy of runs, of the averaged weights if there are any."""
    values = [top1 for result in results if (top1 := _get_top1(result)) is not None]
    return mean_interval(values) if values else None


def _get_top1(result: RunResult) -> float | None:
    evaluation = result.ema or result.eval
    return None if evaluation is None or math.isnan(evaluation.top1) else evaluation.top1


def _compute_top1_gap(results: Mapping[int, RunResult], base_results: Mapping[int, RunResult]) -> Interval | None:
    # Compare runs of the same seed only, so that the variation between seeds cancels.
    pairs = [(_get_top1(results[turn]), _get_top1(base_results[turn])) for turn in sorted({*results} & {*base_results})]
    gaps = [candidate - baseline for candidate, baseline in pairs if candidate is not None and baseline is not None]
    return mean_interval(gaps) if gaps else None


def _compute_efficiency(speeds: Mapping[int, float], base_speeds: Mapping[int, float]) -> Interval | None:
    # Ratios within a turn, as the machine drifts between turns.
    turns = sorted({*speeds} & {*base_speeds})
    return ratio_interval([speeds[turn] for turn in turns], [base_speeds[turn] for turn in turns]) if turns else None


def format_points_csv(points: Sequence[ScalePoint]) -> str:
    """Return the measurements as a table for `paceline predict-scaling --points`, or "" if there are none."""
    rows = [
        f"{point.ranks},{point.nodes},{point.rank_batch},{point.images_per_s.value:.6g},1"
        for point in points
        if point.images_per_s is not None
    ]
    return "\n".join([",".join(POINT_COLUMNS), *rows, ""]) if rows else ""


def describe_shared_cores(section: Parallel, layouts: Sequence[RankLayout], provenance: dict[str, object]) -> str:
    """Return a warning that ranks of one node share its cores, or ""."""
    # On a CPU the ranks share the cores of their node, which a single rank has alone unless `parallel.threads` limits
    # it.
    cores, threads = provenance.get("logical_cores"), section.threads
    most = max(layout.ranks_per_node for layout in layouts)
    if provenance.get("device") != "cpu" or not isinstance(cores, int) or most == 1:
        return ""
    if threads != "auto" and threads * most <= cores:
        return ""
    fix = f" (set parallel.threads={cores // most} to give each as many)" if most <= cores else ""
    return f"Up to {most:,} ranks share the {count(cores, 'core')} of a node, so each has fewer than one alone{fix}."


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
    case: Trial | None
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
    whole = Trial("", length, ranks=ranks, nodes=nodes, first_seed=recipe.seed)
    cells = [
        _plan_cell(recipe, batch_size, warmup, rule, base, whole)
        for batch_size in grid.batch_sizes or (recipe.data.global_batch_size,)
        for warmup in grid.warmups or (None,)
        for rule in ((ANY_RULE,) if batch_size == base else grid.rules or (recipe.optim.lr_scaling,))
    ]
    if all(cell.case is None for cell in cells):
        raise RecipeError(cells[0].error)
    return cells


def _plan_cell(
    recipe: Recipe, batch_size: int, warmup: Duration | None, rule: str, base: int, whole: Trial
) -> BatchCell:
    scaling = "none" if rule == ANY_RULE else rule
    settings: list[Assignment] = [
        ("data.batch_size", batch_size),
        ("optim.lr_scaling", scaling),
        ("optim.base_batch_size", "auto" if scaling == "none" else base),
    ]
    if warmup is not None:
        settings.append(("schedule.warmup", str(warmup)))
        if not warmup.value and not isinstance(
            recipe.schedule, OneCycle | RangeTest
        ):  # these have no effect without a warm-up
            settings += reset_to_defaults(recipe.schedule, "schedule", ("warmup_start", "warmup_shape", "warmup_by"))
    patch = Patch((*whole.patch.assignments, *drop_unchanged_settings(recipe, settings).assignments))
    cell = BatchCell(batch_size, _format_warmup(recipe.schedule, warmup), rule, recipe.optim.lr, None)
    try:
        varied = apply_patch(recipe, patch)
        divide_batch(varied, whole.ranks or 1)
    except RecipeError as error:
        return replace(cell, error=str(error))
    lr = varied.optim.lr * lr_factor(varied.optim, batch_size)
    return replace(cell, lr=lr, case=replace(whole, name=cell.name, patch=patch))


def _format_warmup(schedule: ScheduleSection, warmup: Duration | None) -> str:
    if warmup is not None:
        return str(warmup)
    return "" if isinstance(schedule, OneCycle | RangeTest) else str(schedule.warmup)


def build_batch_points(
    cells: Sequence[BatchCell], outcomes: Sequence[TrialOutcome], seeds: int, target: TargetCriterion | None
) -> tuple[BatchPoint, ...]:
    """Return the results of each cell, and when its runs reached `target`.

    Raise `PacelineError` if the evaluations of a run cannot be read.
    """
    return tuple(_build_batch_point(cell, outcomes, seeds, target) for cell in cells)


def compare_batches(
    cells: Sequence[BatchCell], outcomes: Sequence[TrialOutcome], target: TargetCriterion | None
) -> tuple[str, ...]:
    """Return a sentence per larger batch size: its time to the target relative to the smallest one's.

    Uses the fastest cell per batch size of those whose runs all reached the target.
    """
    best: dict[int, tuple[BatchCell, dict[int, float]]] = {}
    for cell in cells:
        reached = _find_target_evaluations(cell.name, outcomes, target)
        times_s = {turn: evaluation["trained_s"] for turn, evaluation in reached.items()}
        if not times_s or len(times_s) < sum(each.trial.name == cell.name for each in outcomes):
            continue  # a cell with a run that missed the target has no mean time
        previous = best.get(cell.batch_size)
        if previous is None or geometric_mean(times_s.values()) < geometric_mean(previous[1].values()):
            best[cell.batch_size] = (cell, times_s)
    ordered = [best[batch_size] for batch_size in sorted(best)]
    return tuple(_compare_cells(each, ordered[0]) for each in ordered[1:])


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
    name: str, outcomes: Sequence[TrialOutcome], target: TargetCriterion | None
) -> dict[int, dict[str, Any]]:
    if target is None:
        return {}
    evaluations = {
        each.repeat: find_target_evaluation([*read_lines(each.rundir.evals)], target)
        for each in outcomes
        if each.trial.name == name and each.result
    }
    return {turn: evaluation for turn, evaluation in evaluations.items() if evaluation is not None}


def _build_batch_point(
    cell: BatchCell, outcomes: Sequence[TrialOutcome], seeds: int, target: TargetCriterion | None
) -> BatchPoint:
    runs = collect_runs(cell.name, outcomes)
    results = list(runs.results.values())
    reached = _find_target_evaluations(cell.name, outcomes, target).values()
    images_per_s = _mean_ratio([rate for result in results if (rate := result.throughput.images_per_s) > 0])
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
        to_target_s=_mean_ratio([each["trained_s"] for each in reached]),
        to_target_epochs=_mean_ratio([each["epoch"] for each in reached]),
        error=cell.error or runs.error,
        runs=runs.folders,
    )


# Time to a goal error as in Shallue et al. 2019 (arXiv 1811.03600).
def find_target_evaluation(evaluations: Sequence[dict[str, Any]], target: TargetCriterion) -> dict[str, Any] | None:
    """Return the first evaluation that reached the target, of the averaged weights if there are any."""
    values = [each.get("ema_top1", each["top1"]) for each in evaluations]
    index = target.first_reached_at(values)
    return None if index is None else evaluations[index]


def _mean_ratio(values: Sequence[float]) -> Interval | None:
    # Geometric, so that the ratio of two means is the mean ratio of their runs.
    if len(values) == 1:
        return mean_interval(values)  # without rounding by the logarithm
    return ratio_interval(values, [1.0] * len(values)) if values else None
