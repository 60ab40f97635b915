"""Scaling: the same recipe on more ranks, and what each of them still gives. Pure: cases before, points after.

Weak scaling keeps the batch of a rank, strong scaling the whole batch (Gustafson 1988, doi 10.1145/42411.42415; Amdahl
1967, doi 10.1145/1465482.1465560).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from paceline.core.errors import RecipeError
from paceline.core.experiments.scaling import ScalePoint
from paceline.core.interval import Interval, mean_of, ratio_of
from paceline.core.results import CPU_STARVED, RunResult, epoch_s_of, starved_note
from paceline.core.units import count
from paceline.lab.predict.points import COLUMNS
from paceline.lab.trial import Outcome, vary
from paceline.lab.turns import Case, error_of, results_of, runs_of
from paceline.recipe.patch import Patch
from paceline.recipe.plan import divide_batch
from paceline.recipe.schema import Recipe

Mode = Literal["weak", "strong"]
ByRanks = Mapping["Ranks", Mapping[int, RunResult]]
"""Results by turn, of each number of ranks."""


@dataclass(frozen=True)
class Ranks:
    """So many ranks in all, over `nodes` nodes of an allocation (0: here), as many on each."""

    ranks: int
    nodes: int = 0

    @property
    def a_node(self) -> int:
        """Ranks that share a node."""
        return self.ranks // max(1, self.nodes)

    @property
    def name(self) -> str:
        """What they are called: `8 ranks on 2 nodes`."""
        return count(self.ranks, "rank") + (f" on {count(self.nodes, 'node')}" if self.nodes else "")


@dataclass(frozen=True)
class Planned:
    """Ranks and the batch they share; `error` says why the recipe does not run so, and `case` is None then."""

    ranks: Ranks
    batch_size: int
    case: Case | None
    error: str = ""


def ranks_over(a_node: Sequence[int], nodes: Sequence[int]) -> list[Ranks]:
    """Return what is measured: on one node each number of ranks, on more of them the largest on each.

    Without `nodes` it is here. Points on one node tell what ranks cost one another, those beyond it the network.
    """
    if not nodes:
        return [Ranks(ranks) for ranks in sorted({*a_node})]
    alone = [Ranks(ranks, 1) for ranks in sorted({*a_node})] if 1 in nodes else []
    return [*alone, *(Ranks(max(a_node) * num, num) for num in sorted({*nodes}) if num > 1)]


def plan_points(
    recipe: Recipe, mode: Mode, places: Sequence[Ranks], length: Patch, first_seed: int | None
) -> list[Planned]:
    """Return what is to be run on each of `places`, `length` being the patch of a short run or of a whole one.

    The smallest number of ranks has the recipe's batch, and in weak scaling the others as much a rank. Raise
    `RecipeError` where none of them fits, or the smallest does not, which the others are measured by.
    """
    smallest = min(place.ranks for place in places)
    if mode == "weak":
        divide_batch(recipe, smallest)
    rank_batch = recipe.data.global_batch_size // smallest
    planned = []
    for place in places:
        batch_size = rank_batch * place.ranks if mode == "weak" else recipe.data.global_batch_size
        patch = Patch((*length.assignments, *_batch(recipe, batch_size)))
        try:
            divide_batch(vary(recipe, patch), place.ranks)
        except RecipeError as error:
            planned.append(Planned(place, batch_size, None, str(error)))
        else:
            case = Case(place.name, patch, place.ranks, place.nodes, first_seed)
            planned.append(Planned(place, batch_size, case))
    if all(point.case is None for point in planned):
        raise RecipeError(planned[0].error)
    return planned


def _batch(recipe: Recipe, batch_size: int) -> list[tuple[str, int]]:
    return [] if batch_size == recipe.data.global_batch_size else [("data.batch_size", batch_size)]


def to_points(planned: Sequence[Planned], outcomes: Sequence[Outcome]) -> tuple[ScalePoint, ...]:
    """Return what was measured on each number of ranks; efficiency and accuracy are over the smallest that has them.

    A whole run of few steps may have counted none of them, and has no speed.
    """
    measured = {point.ranks: results_of(point.case.name, outcomes) for point in planned if point.case is not None}
    paced = {
        ranks: {turn: each for turn, each in found.items() if _has_speed(each)} for ranks, found in measured.items()
    }
    return tuple(_point(point, measured, paced, outcomes) for point in planned)


def _has_speed(result: RunResult) -> bool:
    return result.throughput.images_per_s > 0


def _smallest(measured: ByRanks) -> Ranks | None:
    """Return the smallest number of ranks of which there are results."""
    return min((ranks for ranks, found in measured.items() if found), key=lambda ranks: ranks.ranks, default=None)


def _point(point: Planned, measured: ByRanks, paced: ByRanks, outcomes: Sequence[Outcome]) -> ScalePoint:
    ranks, results = point.ranks, measured.get(point.ranks, {})
    bare = ScalePoint(
        ranks=point.ranks.ranks,
        nodes=max(1, point.ranks.nodes),
        batch_size=point.batch_size,
        rank_batch=point.batch_size // point.ranks.ranks,
        error=point.error or error_of(point.ranks.name, outcomes),
        runs=runs_of(point.ranks.name, outcomes),
    )
    if not results:
        return bare
    found = _ended(list(results.values()), point) | _pace(list(paced[ranks].values()), point)
    base, paced_base = _smallest(measured), _smallest(paced)
    if paced_base not in (None, ranks):
        efficiency = _efficiency(ranks, paced[ranks], paced_base, paced[paced_base])
        found |= {"efficiency": efficiency, "speedup": _times(efficiency, ranks.ranks)}
    if base not in (None, ranks) and _is_whole(point):
        found["top1_gap"] = _gap(results, measured[base])
    return bare.model_copy(update=found)


def _ended(results: Sequence[RunResult], point: Planned) -> dict[str, object]:
    """Return what each run of one number of ranks has, in the middle, by the names of `ScalePoint`."""
    return {
        "startup_s": median(result.time.startup_s for result in results),
        "wall_s": median(result.time.wall_s for result in results),
        "top1": top1_of(results) if _is_whole(point) else None,
    }


def _pace(results: Sequence[RunResult], point: Planned) -> dict[str, object]:
    """Return what their steps have, in the middle; nothing where there are none."""
    if not results:
        return {}
    rates = [result.throughput.images_per_s for result in results]
    communication = [result.communication for result in results if result.communication is not None]
    return {
        "images_per_s": mean_of(rates),
        "spread": results[0].throughput.spread if len(results) == 1 else (min(rates), max(rates)),
        "step_s": median(point.batch_size / rate for rate in rates),
        "epoch_s": epoch_s_of(results, mean_of(rates)),
        "exposed_s": _middle([waited.exposed_s for waited in communication]),
        "exposed_share": _middle([waited.share for waited in communication]),
        "straggler_share": _middle([result.straggler.share for result in results if result.straggler is not None]),
        "bottleneck": CPU_STARVED if starved_note(results) else results[0].verdict.get("bottleneck", ""),
    }


def _times(found: Interval | None, factor: float) -> Interval | None:
    if found is None:
        return None
    low, high = (None if each is None else factor * each for each in (found.low, found.high))
    return Interval(value=factor * found.value, low=low, high=high, n=found.n)


def starving(outcomes: Sequence[Outcome]) -> str:
    """Return in a sentence that speeds are not the recipe's, as others had the cores; "" where they had not."""
    note = starved_note(outcome.result for outcome in outcomes if outcome.result is not None)
    return (
        f"{note[0].upper()}{note[1:]}: speeds and efficiencies are not those of the recipe (run it again)."
        if note
        else ""
    )


def _middle(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _is_whole(point: Planned) -> bool:
    return point.case is not None and point.case.first_seed is not None


def top1_of(results: Sequence[RunResult]) -> Interval | None:
    """Return the accuracy that runs ended with: of the averaged weights when there are any."""
    judged = [top1 for result in results if (top1 := _top1(result)) is not None]
    return mean_of(judged) if judged else None


def _top1(result: RunResult) -> float | None:
    judged = result.ema or result.eval
    return None if judged is None else judged.top1


def _gap(results: Mapping[int, RunResult], base_results: Mapping[int, RunResult]) -> Interval | None:
    """Return the accuracy less that of the base, as the mean over seeds that both were trained with."""
    pairs = [(_top1(results[turn]), _top1(base_results[turn])) for turn in sorted({*results} & {*base_results})]
    gaps = [here - there for here, there in pairs if here is not None and there is not None]
    return mean_of(gaps) if gaps else None


def _efficiency(
    ranks: Ranks, results: Mapping[int, RunResult], base: Ranks, base_results: Mapping[int, RunResult]
) -> Interval | None:
    """Return the images/s of a rank over those of a rank of the base, from runs of the same turns."""
    turns = sorted({*results} & {*base_results})
    if not turns:
        return None
    return ratio_of(
        [results[turn].throughput.images_per_s / ranks.ranks for turn in turns],
        [base_results[turn].throughput.images_per_s / base.ranks for turn in turns],
    )


def points_csv(points: Sequence[ScalePoint]) -> str:
    """Return what was measured as the table that `paceline scale --predict --points` reads; "" where nothing was.

    A speed is the images of one second.
    """
    rows = [
        f"{point.ranks},{point.nodes},{point.rank_batch},{point.images_per_s.value:.6g},1"
        for point in points
        if point.images_per_s is not None
    ]
    return "\n".join([",".join(COLUMNS), *rows, ""]) if rows else ""


def caution_of(recipe: Recipe, places: Sequence[Ranks], provenance: dict[str, object]) -> str:
    """Return in a sentence what ranks share that more machines would each have; "" where they share nothing of note.

    On a CPU ranks compute with the cores of their node, which one rank has alone unless `parallel.threads` says less.
    """
    cores, threads = provenance.get("logical_cores"), recipe.parallel.threads
    most = max(place.a_node for place in places)
    if provenance.get("device") != "cpu" or not isinstance(cores, int) or most == 1:
        return ""
    if threads != "auto" and threads * most <= cores:
        return ""
    fix = f" (set parallel.threads={cores // most} to give each as many)" if most <= cores else ""
    return f"Up to {most:,} ranks share the {count(cores, 'core')} of a node, so each has fewer than one alone{fix}."
