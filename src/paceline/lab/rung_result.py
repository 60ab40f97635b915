"""What the runs of a rung come to: its speed, its stages, its memory, and whether it is kept, and why. Pure but for
reading the losses of runs. It runs nothing.
"""

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

_FIRST: Final = "the first, which all others stand on"


def unmeasured(
    rung: Rung,
    below: str,
    status: Literal["failed", "left_out"],
    why: str,
    added: Patch | None = None,
    *,
    prepare_s: float = 0.0,
) -> RungResult:
    """Return a rung that nothing was measured of."""
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
    """Return what the first rung came to; all of its runs have a result."""
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
    """Return what a rung came to in at least one pair of runs, all of which have a result.

    `below` is the name of the rung below, `ratios` those of the rungs up to it, and `recipe` what the rung trains.
    """
    here, under = results_of(pairs.here), results_of(pairs.below)
    ratio = pairs.ratio
    parity = pairs.parity(recipe.measure.warmup_steps) if rung.parity == "same" else None
    starved = starved_note((*here, *under))
    is_kept, why = _decide(rung, ratio, parity, starved)
    stages, stages_below = _stages(here), _stages(under)
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
        **_measured(here, recipe),
    )


def _decide(rung: Rung, ratio: Interval, parity: ParityResult | None, starved: str) -> tuple[bool, str]:
    """Return whether a rung is kept, and why; `starved` says that others had the cores, in which case none has won."""
    found = f"{times(ratio)} in {count(ratio.n, 'pair')}"
    if parity is not None and forbids(parity):
        return False, f"trains otherwise: {parity.why} ({found})"
    unproved = doubt(parity) if rung.parity == "same" else ""
    if starved:
        again = "run it again when nothing else runs here"
        always = ", and kept however fast it is" if rung.keep == "always" else ""
        return rung.keep == "always", f"not to be told{always}: {starved} ({again}; {found})"
    if ratio.is_above(1):
        return True, f"faster: {found}{unproved}"
    what, more = _no_gain(ratio)
    if rung.keep == "always":
        return True, f"{what}, and kept however fast it is: {found}{unproved}"
    return False, f"{what}: {found}{more}"


def _no_gain(ratio: Interval) -> tuple[str, str]:
    """Return what a ratio shows that is no gain, and what would tell more."""
    if ratio.n == 1:
        return "one pair proves nothing", " (ask for --repeats 3)"
    return "slower" if ratio.is_below(1) else "no gain to be told", ""


def _measured(results: Sequence[RunResult], recipe: Recipe) -> "_Figures":
    """Return what runs of a rung have measured, as fields of its result."""
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
    """Fields of `RungResult` that are measured."""

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
    """Return the stages in device seconds of a step: means over runs that counted steps."""
    counted = [(result.stages, result.account.counted_steps) for result in results if result.account is not None]
    counted = [(stages, num_steps) for stages, num_steps in counted if num_steps]
    names = dict.fromkeys(name for stages, _ in counted for name in stages)
    return {
        name: fmean(stages[name].device_s / num_steps if name in stages else 0.0 for stages, num_steps in counted)
        for name in names
    }


def _folders(outcomes: Sequence[Outcome], root: Path) -> tuple[str, ...]:
    return tuple(outcome.rundir.path.relative_to(root).as_posix() for outcome in outcomes)
