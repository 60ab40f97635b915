"""Build the result of a rung from its runs, and decide whether the rung is kept. Runs nothing; reads losses."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, Literal, TypedDict

from paceline.core.experiments.ladder import ParityResult, RungResult
from paceline.core.interval import Interval, mean_of, product_of
from paceline.core.results import RunResult, epoch_s_of, starved_note
from paceline.core.units import count
from paceline.lab.pairs import Pairs, rates, results_of
from paceline.lab.parity import doubt, forbids
from paceline.lab.rungs import Rung
from paceline.lab.times import times
from paceline.lab.trial import Outcome, words_of
from paceline.recipe.patch import Patch
from paceline.recipe.plan import resolve_batch
from paceline.recipe.schema import Recipe

_FIRST: Final = "the first, the baseline of all others"


def unmeasured(
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
        patch=tuple(words_of(rung.patch if added is None else added)),
        status=status,
        why=why,
        below=below,
        expects=rung.expects,
        prepare_s=prepare_s,
    )


def first_result(
    rung: Rung, added: Patch, outcomes: Sequence[Outcome], *, prepare_s: float, root: Path, recipe: Recipe
) -> RungResult:
    """Return the result of the first rung; all of its runs have a result."""
    results = results_of(outcomes)
    return RungResult(
        name=rung.name,
        explains=rung.explains,
        patch=tuple(words_of(added)),
        status="kept",
        why=_FIRST,
        starved=starved_note(results),
        expects=rung.expects,
        prepare_s=prepare_s,
        runs=_folders(outcomes, root),
        **_measured(results, recipe),
    )


def judged(
    rung: Rung,
    added: Patch,
    pairs: Pairs,
    *,
    below: str,
    ratios: Sequence[Interval],
    prepare_s: float,
    root: Path,
    recipe: Recipe,
) -> RungResult:
    """Return the result of a rung from at least one pair of completed runs.

    `below` is the baseline's name, `ratios` those of the rungs up to it, and `recipe` what the rung trains.
    """
    candidates, baselines = results_of(pairs.here), results_of(pairs.below)
    ratio = pairs.ratio
    parity = pairs.parity(recipe.measure.warmup_steps) if rung.parity == "same" else None
    starved = starved_note((*candidates, *baselines))
    is_kept, why = _decide(rung, ratio, parity, starved)
    stages, stages_below = _stages(candidates), _stages(baselines)
    return RungResult(
        name=rung.name,
        explains=rung.explains,
        patch=tuple(words_of(added)),
        status="kept" if is_kept else "dropped",
        why=why,
        starved=starved,
        below=below,
        expects=rung.expects,
        shrank={name: (stages_below.get(name, 0.0), stages.get(name, 0.0)) for name in rung.expects},
        over_below=ratio,
        over_first=product_of([*ratios, ratio]),
        parity=parity,
        prepare_s=prepare_s,
        runs=_folders([each for pair in pairs.whole for each in (pair.below, pair.here)], root),
        **_measured(candidates, recipe),
    )


def _decide(rung: Rung, ratio: Interval, parity: ParityResult | None, starved: str) -> tuple[bool, str]:
    """Return whether a rung is kept, and why; `starved` is a note if other processes used the cores, "" if not."""
    measured = f"{times(ratio)} in {count(ratio.n, 'pair')}"
    if parity is not None and forbids(parity):
        return False, f"trains differently: {parity.why} ({measured})"
    unproved = doubt(parity) if rung.parity == "same" else ""
    # Nothing wins while other processes use the cores.
    if starved:
        advice = "run it again on an idle machine"
        kept_note = ", and kept at any speed" if rung.keep == "always" else ""
        return rung.keep == "always", f"unknown{kept_note}: {starved} ({advice}; {measured})"
    if ratio.is_above(1):
        return True, f"faster: {measured}{unproved}"
    what, more = _no_gain(ratio)
    if rung.keep == "always":
        return True, f"{what}, and kept at any speed: {measured}{unproved}"
    return False, f"{what}: {measured}{more}"


def _no_gain(ratio: Interval) -> tuple[str, str]:
    """Return a description of a ratio that is no gain, and advice to learn more."""
    if ratio.n == 1:
        return "one pair proves nothing", " (ask for --repeats 3)"
    return "slower" if ratio.is_below(1) else "no measurable gain", ""


def _measured(results: Sequence[RunResult], recipe: Recipe) -> "_Figures":
    """Return the measurements of a rung as fields of its result."""
    speeds = rates(results)
    images_per_s = mean_of(speeds)
    memory = [result.memory for result in results if result.memory is not None]
    batch_size = resolve_batch(recipe, results[-1].world_size).data.global_batch_size
    compiling = [result.account.compile_s for result in results if result.account is not None]
    return _Figures(
        images_per_s=images_per_s,
        spread=(min(speeds), max(speeds)) if len(speeds) > 1 else results[0].throughput.spread,
        stages=_stages(results),
        step_s=fmean(batch_size / rate for rate in speeds),
        epoch_s=epoch_s_of(results, images_per_s),
        startup_s=fmean(result.time.startup_s for result in results),
        compile_s=fmean(compiling) if compiling else None,
        host_bytes=max((each.host_bytes for each in memory), default=None),
        device_bytes=max((each.device_bytes for each in memory if each.device_bytes is not None), default=None),
        verdict=results[-1].verdict,
        ranks=results[-1].world_size,
    )


class _Figures(TypedDict):
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


def _stages(results: Sequence[RunResult]) -> dict[str, float]:
    """Return the device seconds per step of each stage: means over runs that measured steps."""
    counted = [(result.stages, result.account.counted_steps) for result in results if result.account is not None]
    counted = [(stages, num_steps) for stages, num_steps in counted if num_steps]
    names = dict.fromkeys(name for stages, _ in counted for name in stages)
    return {
        name: fmean(stages[name].device_s / num_steps if name in stages else 0.0 for stages, num_steps in counted)
        for name in names
    }


def _folders(outcomes: Sequence[Outcome], root: Path) -> tuple[str, ...]:
    return tuple(outcome.rundir.path.relative_to(root).as_posix() for outcome in outcomes)
