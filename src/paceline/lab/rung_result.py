"""What the runs of a rung come to: its speed, its stages, its memory, and whether it is kept, and why. Pure but for
reading the losses of runs. It runs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final, Literal, TypedDict

from paceline.core.experiments.ladder import ParityResult, RungResult
from paceline.core.interval import Interval, mean_of, product_of, ratio_of
from paceline.core.results import RunResult
from paceline.core.units import count
from paceline.lab.parity import mean_loss, parity_of
from paceline.lab.rungs import Rung
from paceline.lab.trial import Outcome, words_of
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe

Status = Literal["kept", "dropped", "failed", "left_out"]
_FIRST: Final = "the first, which all others stand on"


@dataclass(frozen=True)
class Pair:
    """A run of a rung and one of the rung below, made one right after the other with the same seed."""

    here: Outcome
    below: Outcome


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
    results = _results(outcomes)
    return RungResult(
        name=rung.name,
        explains=rung.explains,
        patch=tuple(words_of(added)),
        status="kept",
        why=_FIRST,
        expects=rung.expects,
        prepare_s=prepare_s,
        runs=_folders(outcomes, root),
        **_measured(results, recipe),
    )


def judged(
    rung: Rung,
    added: Patch,
    pairs: Sequence[Pair],
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
    here, under = _results([pair.here for pair in pairs]), _results([pair.below for pair in pairs])
    ratio = ratio_of(_rates(here), _rates(under))
    parity = _parity(pairs, recipe.measure.warmup_steps) if rung.parity == "same" else None
    is_kept, why = _decide(rung, ratio, parity)
    stages, stages_below = _stages(here), _stages(under)
    return RungResult(
        name=rung.name,
        explains=rung.explains,
        patch=tuple(words_of(added)),
        status="kept" if is_kept else "dropped",
        why=why,
        below=below,
        expects=rung.expects,
        shrank={name: (stages_below.get(name, 0.0), stages.get(name, 0.0)) for name in rung.expects},
        over_below=ratio,
        over_first=product_of([*ratios, ratio]),
        parity=parity,
        prepare_s=prepare_s,
        runs=_folders([each for pair in pairs for each in (pair.below, pair.here)], root),
        **_measured(here, recipe),
    )


def _decide(rung: Rung, ratio: Interval, parity: ParityResult | None) -> tuple[bool, str]:
    """Return whether a rung is kept, and why."""
    found = f"{_times(ratio)} in {count(ratio.n, 'pair')}"
    if parity is not None and parity.verdict == "differs":
        return False, f"trains otherwise: {parity.why} ({found})"
    if ratio.is_above(1):
        return True, f"faster: {found}"
    what = "slower" if ratio.is_below(1) else "no gain to be told"
    if rung.keep == "always":
        return True, f"{what}, and kept however fast it is: {found}"
    return False, f"{what}: {found}"


def _times(ratio: Interval) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.2f}x"
    return f"{ratio.value:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"


def _parity(pairs: Sequence[Pair], warmup_steps: int) -> ParityResult | None:
    """Compare the losses of pairs that both have one; None where none does."""
    losses = [(mean_loss(pair.here.rundir, warmup_steps), mean_loss(pair.below.rundir, warmup_steps)) for pair in pairs]
    told = [(here, below) for here, below in losses if here and below]
    return parity_of([here for here, _ in told], [below for _, below in told]) if told else None


def _measured(results: Sequence[RunResult], recipe: Recipe) -> "_Figures":
    """Return what runs of a rung have measured, as fields of its result."""
    rates = _rates(results)
    memory = [result.memory for result in results if result.memory is not None]
    compiling = [result.account.compile_s for result in results if result.account is not None]
    return _Figures(
        images_per_s=mean_of(rates),
        spread=(min(rates), max(rates)) if len(rates) > 1 else results[0].throughput.spread,
        stages=_stages(results),
        step_s=fmean(recipe.data.batch_size / rate for rate in rates),
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
    startup_s: float
    compile_s: float | None
    host_bytes: int | None
    device_bytes: int | None
    verdict: dict[str, str]
    ranks: int


def _rates(results: Sequence[RunResult]) -> list[float]:
    return [result.throughput.images_per_s for result in results]


def _stages(results: Sequence[RunResult]) -> dict[str, float]:
    """Return the stages in device seconds of a step: means over runs that counted steps."""
    counted = [(result.stages, result.account.counted_steps) for result in results if result.account is not None]
    counted = [(stages, num_steps) for stages, num_steps in counted if num_steps]
    names = dict.fromkeys(name for stages, _ in counted for name in stages)
    return {
        name: fmean(stages[name].device_s / num_steps if name in stages else 0.0 for stages, num_steps in counted)
        for name in names
    }


def _results(outcomes: Sequence[Outcome]) -> list[RunResult]:
    return [outcome.result for outcome in outcomes if outcome.result is not None]


def _folders(outcomes: Sequence[Outcome], root: Path) -> tuple[str, ...]:
    return tuple(outcome.rundir.path.relative_to(root).as_posix() for outcome in outcomes)
