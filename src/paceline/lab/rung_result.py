"""Build the result of a rung from its runs, and decide whether the rung is kept. Runs nothing."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, Literal, TypedDict

from paceline.core.experiments.results import ParityResult, RungResult
from paceline.core.results import RunResult, epoch_seconds, starved_note
from paceline.core.statistics import Interval, mean_interval, product_interval
from paceline.core.units import count
from paceline.lab.ab_test import (
    PairedRuns,
    collect_results,
    collect_throughputs,
    format_parity_caveat,
    format_speedup,
    is_disqualifying,
)
from paceline.lab.ladder_file import Rung
from paceline.lab.trial import TrialOutcome, format_patch
from paceline.recipe.load import Patch
from paceline.recipe.plan import resolve_batch
from paceline.recipe.schema import Recipe

_FIRST_RUNG_REASON: Final = "the first, the baseline of all others"


def build_unmeasured_result(
    rung: Rung,
    below: str,
    status: Literal["failed", "left_out"],
    why: str,
    added: Patch | None = None,
    *,
    prepare_s: float = 0.0,
) -> RungResult:
    """Return the result of a rung without measurements."""
    return RungResult(
        name=rung.name,
        explains=rung.explains,
        patch=tuple(format_patch(rung.patch if added is None else added)),
        status=status,
        why=why,
        below=below,
        expects=rung.expects,
        prepare_s=prepare_s,
    )


def build_first_result(
    rung: Rung, added: Patch, outcomes: Sequence[TrialOutcome], *, prepare_s: float, root: Path, recipe: Recipe
) -> RungResult:
    """Return the result of the first rung, whose runs have all succeeded."""
    results = collect_results(outcomes)
    return RungResult(
        name=rung.name,
        explains=rung.explains,
        patch=tuple(format_patch(added)),
        status="kept",
        why=_FIRST_RUNG_REASON,
        starved=starved_note(results),
        expects=rung.expects,
        prepare_s=prepare_s,
        runs=_relative_folders(outcomes, root),
        **_summarize_runs(results, recipe),
    )


def build_rung_result(
    rung: Rung,
    added: Patch,
    pairs: PairedRuns,
    *,
    baseline: str,
    ratios_below: Sequence[Interval],
    prepare_s: float,
    root: Path,
    recipe: Recipe,
) -> RungResult:
    """Return the result of a rung from at least one pair of completed runs.

    `ratios_below` are those of the rungs up to `baseline`, and `recipe` is the rung's.
    """
    candidates, baselines = collect_results(pairs.candidates), collect_results(pairs.baselines)
    ratio = pairs.ratio
    parity = pairs.parity(recipe.measure.warmup_steps) if rung.parity == "same" else None
    starved = starved_note((*candidates, *baselines))
    is_kept, why = _decide_if_kept(rung, ratio, parity, starved)
    stages, stages_below = _mean_stages(candidates), _mean_stages(baselines)
    return RungResult(
        name=rung.name,
        explains=rung.explains,
        patch=tuple(format_patch(added)),
        status="kept" if is_kept else "dropped",
        why=why,
        starved=starved,
        below=baseline,
        expects=rung.expects,
        shrank={name: (stages_below.get(name, 0.0), stages.get(name, 0.0)) for name in rung.expects},
        over_below=ratio,
        over_first=product_interval([*ratios_below, ratio]),
        parity=parity,
        prepare_s=prepare_s,
        runs=_relative_folders([each for pair in pairs.complete for each in (pair.baseline, pair.candidate)], root),
        **_summarize_runs(candidates, recipe),
    )


def _decide_if_kept(rung: Rung, ratio: Interval, parity: ParityResult | None, starved: str) -> tuple[bool, str]:
    measured = f"{format_speedup(ratio)} in {count(ratio.n, 'pair')}"
    if parity is not None and is_disqualifying(parity):
        return False, f"trains differently: {parity.why} ({measured})"
    unproved = format_parity_caveat(parity) if rung.parity == "same" else ""
    # Nothing wins while other processes use the cores.
    if starved:
        advice = "run it again on an idle machine"
        kept_note = ", and kept at any speed" if rung.keep == "always" else ""
        return rung.keep == "always", f"unknown{kept_note}: {starved} ({advice}; {measured})"
    if ratio.is_above(1):
        return True, f"faster: {measured}{unproved}"
    what, more = _explain_no_gain(ratio)
    if rung.keep == "always":
        return True, f"{what}, and kept at any speed: {measured}{unproved}"
    return False, f"{what}: {measured}{more}"


def _explain_no_gain(ratio: Interval) -> tuple[str, str]:
    # One pair has no interval.
    if ratio.n == 1:
        return "one pair proves nothing", " (ask for --repeats 3)"
    return "slower" if ratio.is_below(1) else "no measurable gain", ""


def _summarize_runs(results: Sequence[RunResult], recipe: Recipe) -> "_RungMeasurements":
    speeds = collect_throughputs(results)
    images_per_s = mean_interval(speeds)
    # Memory is the maximum over runs: it must fit in each of them.
    memory = [result.memory for result in results if result.memory is not None]
    batch_size = resolve_batch(recipe, results[-1].world_size).data.global_batch_size
    compiling = [result.account.compile_s for result in results if result.account is not None]
    return _RungMeasurements(
        images_per_s=images_per_s,
        spread=(min(speeds), max(speeds)) if len(speeds) > 1 else results[0].throughput.spread,
        stages=_mean_stages(results),
        step_s=fmean(batch_size / rate for rate in speeds),
        epoch_s=epoch_seconds(results, images_per_s),
        startup_s=fmean(result.time.startup_s for result in results),
        compile_s=fmean(compiling) if compiling else None,
        host_bytes=max((each.host_bytes for each in memory), default=None),
        device_bytes=max((each.device_bytes for each in memory if each.device_bytes is not None), default=None),
        verdict=results[-1].verdict,
        ranks=results[-1].world_size,
    )


class _RungMeasurements(TypedDict):
    """Measured fields of `RungResult`."""

    images_per_s: Interval
    spread: tuple[float, float]
    stages: dict[str, float]
    step_s: float
    epoch_s: float | None
    startup_s: float
    compile_s: float | None
    host_bytes: int | None
    device_bytes: int | None
    verdict: dict[str, str]
    ranks: int


def _mean_stages(results: Sequence[RunResult]) -> dict[str, float]:
    """Return the device seconds per step of each stage: means over runs that measured steps."""
    counted = [(result.stages, result.account.counted_steps) for result in results if result.account is not None]
    counted = [(stages, num_steps) for stages, num_steps in counted if num_steps]
    names = dict.fromkeys(name for stages, _ in counted for name in stages)
    return {
        name: fmean(stages[name].device_s / num_steps if name in stages else 0.0 for stages, num_steps in counted)
        for name in names
    }


def _relative_folders(outcomes: Sequence[TrialOutcome], root: Path) -> tuple[str, ...]:
    return tuple(outcome.rundir.path.relative_to(root).as_posix() for outcome in outcomes)
