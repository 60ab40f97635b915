"""Scaling studies: plan runs on increasing numbers of ranks, and compute speedup and efficiency. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from paceline.core.errors import RecipeError
from paceline.core.experiments.results import ScalePoint
from paceline.core.results import CPU_STARVED, RunResult, epoch_seconds, starved_note
from paceline.core.statistics import Interval, mean_interval, ratio_interval
from paceline.core.units import count
from paceline.lab.predict.points import POINT_COLUMNS
from paceline.lab.repeat import RunCase, find_first_error, list_completed_folders, results_by_repeat
from paceline.lab.trial import TrialOutcome, apply_patch
from paceline.recipe.load import Patch
from paceline.recipe.plan import divide_batch
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.train import Parallel

ScalingMode = Literal["weak", "strong"]
"""Weak scaling keeps the batch size per rank, strong scaling the global batch size.

Gustafson 1988, doi 10.1145/42411.42415; Amdahl 1967, doi 10.1145/1465482.1465560.
"""
ResultsByLayout = Mapping["RankLayout", Mapping[int, RunResult]]
"""Results by turn, for each number of ranks."""


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
    case: RunCase | None
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
        patch = Patch((*length.assignments, *_build_batch_assignments(recipe, batch_size)))
        try:
            divide_batch(apply_patch(recipe, patch), layout.ranks)
        except RecipeError as error:  # this number of ranks does not divide the batch; others may
            planned.append(PlannedPoint(layout, batch_size, None, str(error)))
        else:
            case = RunCase(layout.name, patch, layout.ranks, layout.nodes, first_seed)
            planned.append(PlannedPoint(layout, batch_size, case))
    if all(point.case is None for point in planned):
        raise RecipeError(planned[0].error)
    return planned


def _build_batch_assignments(recipe: Recipe, batch_size: int) -> list[tuple[str, int]]:
    return [] if batch_size == recipe.data.global_batch_size else [("data.batch_size", batch_size)]


def build_scale_points(planned: Sequence[PlannedPoint], outcomes: Sequence[TrialOutcome]) -> tuple[ScalePoint, ...]:
    """Return the measurement of each point, with efficiency and accuracy relative to the smallest measured one."""
    measured = {
        point.ranks: results_by_repeat(point.case.name, outcomes) for point in planned if point.case is not None
    }
    # A full run with few steps may have no measured steps, and so no speed.
    timed = {
        ranks: {turn: each for turn, each in results.items() if _has_speed(each)} for ranks, results in measured.items()
    }
    return tuple(_build_point(point, measured, timed, outcomes) for point in planned)


def _has_speed(result: RunResult) -> bool:
    return result.throughput.images_per_s > 0


def _find_smallest_layout(measured: ResultsByLayout) -> RankLayout | None:
    return min((ranks for ranks, results in measured.items() if results), key=lambda ranks: ranks.ranks, default=None)


def _build_point(
    point: PlannedPoint, measured: ResultsByLayout, timed: ResultsByLayout, outcomes: Sequence[TrialOutcome]
) -> ScalePoint:
    ranks, results = point.ranks, measured.get(point.ranks, {})
    empty_point = ScalePoint(
        ranks=point.ranks.ranks,
        nodes=max(1, point.ranks.nodes),
        batch_size=point.batch_size,
        rank_batch=point.batch_size // point.ranks.ranks,
        error=point.error or find_first_error(point.ranks.name, outcomes),
        runs=list_completed_folders(point.ranks.name, outcomes),
    )
    if not results:
        return empty_point
    fields = _summarize_runs(list(results.values()), point) | _summarize_steps(list(timed[ranks].values()), point)
    base, timed_base = _find_smallest_layout(measured), _find_smallest_layout(timed)
    if timed_base not in (None, ranks):
        efficiency = _compute_efficiency(ranks, timed[ranks], timed_base, timed[timed_base])
        fields |= {"efficiency": efficiency, "speedup": _scale_interval(efficiency, ranks.ranks)}
    if base not in (None, ranks) and _is_full_run(point):
        fields["top1_gap"] = _compute_top1_gap(results, measured[base])
    return empty_point.model_copy(update=fields)


def _summarize_runs(results: Sequence[RunResult], point: PlannedPoint) -> dict[str, object]:
    return {
        "startup_s": median(result.time.startup_s for result in results),
        "wall_s": median(result.time.wall_s for result in results),
        "top1": compute_mean_top1(results) if _is_full_run(point) else None,
    }


def _summarize_steps(results: Sequence[RunResult], point: PlannedPoint) -> dict[str, object]:
    if not results:
        return {}
    rates = [result.throughput.images_per_s for result in results]
    communication = [result.communication for result in results if result.communication is not None]
    return {
        "images_per_s": mean_interval(rates),
        "spread": results[0].throughput.spread if len(results) == 1 else (min(rates), max(rates)),
        "step_s": median(point.batch_size / rate for rate in rates),
        "epoch_s": epoch_seconds(results, mean_interval(rates)),
        "exposed_s": _median_or_none([waited.exposed_s for waited in communication]),
        "exposed_share": _median_or_none([waited.share for waited in communication]),
        "straggler_share": _median_or_none(
            [result.straggler.share for result in results if result.straggler is not None]
        ),
        "bottleneck": CPU_STARVED if starved_note(results) else results[0].verdict.get("bottleneck", ""),
    }


def _scale_interval(interval: Interval | None, factor: float) -> Interval | None:
    if interval is None:
        return None
    low, high = (None if each is None else factor * each for each in (interval.low, interval.high))
    return Interval(value=factor * interval.value, low=low, high=high, n=interval.n)


def describe_cpu_starvation(outcomes: Sequence[TrialOutcome]) -> str:
    """Return a warning that other processes used the cores, or ""."""
    note = starved_note(outcome.result for outcome in outcomes if outcome.result is not None)
    return (
        f"{note[0].upper()}{note[1:]}: speeds and efficiencies are not those of the recipe (run it again)."
        if note
        else ""
    )


def _median_or_none(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _is_full_run(point: PlannedPoint) -> bool:
    return point.case is not None and point.case.first_seed is not None


def compute_mean_top1(results: Sequence[RunResult]) -> Interval | None:
    """Return the final accuracy of runs, of the averaged weights if there are any."""
    values = [top1 for result in results if (top1 := _get_top1(result)) is not None]
    return mean_interval(values) if values else None


def _get_top1(result: RunResult) -> float | None:
    evaluation = result.ema or result.eval
    return None if evaluation is None else evaluation.top1


def _compute_top1_gap(results: Mapping[int, RunResult], base_results: Mapping[int, RunResult]) -> Interval | None:
    # Compare runs of the same seed only, so that the variation between seeds cancels.
    pairs = [(_get_top1(results[turn]), _get_top1(base_results[turn])) for turn in sorted({*results} & {*base_results})]
    gaps = [candidate - baseline for candidate, baseline in pairs if candidate is not None and baseline is not None]
    return mean_interval(gaps) if gaps else None


def _compute_efficiency(
    ranks: RankLayout, results: Mapping[int, RunResult], base: RankLayout, base_results: Mapping[int, RunResult]
) -> Interval | None:
    # Ratios within a turn, as the machine drifts between turns.
    turns = sorted({*results} & {*base_results})
    if not turns:
        return None
    return ratio_interval(
        [results[turn].throughput.images_per_s / ranks.ranks for turn in turns],
        [base_results[turn].throughput.images_per_s / base.ranks for turn in turns],
    )


def format_points_csv(points: Sequence[ScalePoint]) -> str:
    """Return the measurements as a table for `paceline scale --predict --points`, or "" if there are none."""
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
