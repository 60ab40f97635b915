"""Measure a ladder of a training script: compare each rung with the last one kept, in pairs of short runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Protocol

from paceline.core.errors import PacelineError
from paceline.core.experiments.results import ParityResult, RungResult
from paceline.core.statistics import Interval, mean_interval, product_interval, ratio_interval
from paceline.core.units import milliseconds
from paceline.lab.ab_test import assess_parity, decide_by_speed, format_paired_speedup, is_disqualifying
from paceline.lab.repeat import alternate_order
from paceline.lab.script_ladder_file import BASE, ScriptRung, describe_rung
from paceline.lab.script_settings import ScriptSettings
from paceline.watch.measured_run import OUTPUT, MeasuredRun

_BASE_REASON: Final = "the command as it is, the baseline of all others"
_SAME_LOSS: Final = 1e-4
"""Relative difference of the first loss of two runs of the same command, from which the script counts as not
reproducible. Other kernels round in the seventh digit; other weights or images differ in the second."""
NOT_REPRODUCIBLE: Final = (
    "losses were not compared: two runs of the same command begin with different losses (set the script's seed, or "
    "its option for it)"
)
_SAME_BATCH: Final = 1.1
_NOT_FINITE: Final = "losses are not finite"
_MIN_WORKERS: Final = 2  # one can hardly load faster than the rank itself
_MAX_WORKERS: Final = 8


class ScriptRunner(Protocol):
    """Runs a command for the steps of a measurement in the folder of a run."""

    def __call__(self, settings: ScriptSettings, folder: Path) -> MeasuredRun:
        """Return the run."""
        ...


@dataclass(frozen=True)
class ScriptHost:
    """Numbers of GPUs and CPU cores of the machine."""

    gpus: int
    cores: int


@dataclass(frozen=True)
class _State:
    """The last rung kept, and the ratios of the rungs up to it, each over its baseline."""

    name: str
    settings: ScriptSettings
    ratios: tuple[Interval, ...] = ()


@dataclass(frozen=True)
class ScriptOutcome:
    """Results of a measured ladder: its rungs, the settings that were kept, a run of the command as it is, and why
    losses were not compared."""

    rungs: tuple[RungResult, ...]
    best: str
    settings: ScriptSettings
    first: MeasuredRun
    note: str
    wall_s: float


@dataclass
class ScriptLadderRunner:
    """Measure `rungs` over `settings`, each in `repeats` pairs of runs; `report` receives progress lines."""

    rungs: Sequence[ScriptRung]
    settings: ScriptSettings
    run_script: ScriptRunner
    folder: Path
    host: ScriptHost
    repeats: int
    report: Callable[[str], None]
    _note: str = field(default="", init=False)
    _wall_s: float = field(default=0.0, init=False)

    def run(self) -> ScriptOutcome:
        """Measure all rungs. Raise `PacelineError` if the command as it is fails."""
        runs: list[MeasuredRun] = []
        for name in self._names(1):
            runs.append(self._run(BASE, name, self.settings))
            if runs[-1].failure:  # nothing can be compared
                fix = f"see {self.folder / name / OUTPUT}"
                if runs[-1].exit_code == 0:
                    fix += ", and train for longer or set fewer --steps"
                raise PacelineError(f"the command {runs[-1].failure} ({fix})")
        self._note = _find_irreproducibility(runs)
        if self._note:
            self.report(self._note)
        state = _State(BASE, self.settings)
        rungs = [_describe(BASE, "", ("unchanged",), "kept", _BASE_REASON, runs=self._names(1), **_summarize(runs))]
        for number, rung in enumerate(self.rungs, 2):
            state, result = self._measure(rung, number, state, runs[0])
            self.report(f"{result.name}: {result.status.replace('_', ' ')}: {result.why}")
            rungs.append(result)
        return ScriptOutcome(tuple(rungs), state.name, state.settings, runs[0], self._note, self._wall_s)

    def _measure(self, rung: ScriptRung, number: int, below: _State, first: MeasuredRun) -> tuple[_State, RungResult]:
        """Return the state above a rung, and its result."""

        def result(status: str, why: str, **fields: Any) -> RungResult:
            return _describe(rung.name, rung.explains, describe_rung(rung), status, why, below=below.name, **fields)

        why = self._find_misfit(rung, first)
        if why:
            return below, result("left_out", why)
        settings = self._resolve_workers(below.settings.add(rung), first)
        names = self._names(number)
        unapplied: Mapping[str, str] = {}
        pairs: list[tuple[MeasuredRun, MeasuredRun]] = []
        for turn in range(1, self.repeats + 1):
            runs: dict[bool, MeasuredRun] = {}
            for is_candidate in alternate_order((True, False), turn):  # a rung that does not fit ends at once
                name, each = (rung.name, settings) if is_candidate else (below.name, below.settings)
                run = self._run(name, names[2 * turn - 1 - (not is_candidate)], each)
                if is_candidate:
                    unapplied = _list_unapplied(rung, run)
                    if len(unapplied) == rung.num_changes:
                        return below, result("left_out", f"not applied: {'; '.join(dict.fromkeys(unapplied.values()))}")
                if run.failure:
                    return below, result("failed", run.failure if is_candidate else f"{below.name}: {run.failure}")
                runs[is_candidate] = run
            pairs.append((runs[True], runs[False]))
        costs = _costs(pairs)
        if costs is None:
            return below, result("left_out", "it changes the images per step, whose number is unknown")
        ratio = ratio_interval(*costs)
        is_kept, why, parity = self._decide(rung, ratio, pairs)
        if unapplied:
            why += "".join(f"; {name} was not applied: {reason}" for name, reason in unapplied.items())
            applied = {name: value for name, value in settings.patches.items() if name not in unapplied}
            settings = replace(settings, patches=applied)
        above = replace(below, name=rung.name, settings=settings, ratios=(*below.ratios, ratio)) if is_kept else below
        return above, result(
            "kept" if is_kept else "dropped",
            why,
            over_below=ratio,
            over_first=product_interval([*below.ratios, ratio]),
            parity=parity,
            runs=names,
            **_summarize([run for run, _ in pairs]),
        )

    def _find_misfit(self, rung: ScriptRung, first: MeasuredRun) -> str:
        """Return why a rung does not fit this machine or script, "" if it does."""
        match rung.on:
            case "cuda" if not self.host.gpus:
                return "only helps with a GPU, but there is none"
            case "cpu" if self.host.gpus:
                return "only helps without a GPU"
            case "ranks" if first.result.world_size == 1:
                return "only helps with more than one rank"
        return ""

    def _resolve_workers(self, settings: ScriptSettings, first: MeasuredRun) -> ScriptSettings:
        if settings.patches.get("workers") != "auto":
            return settings
        ranks = max(1, first.result.world_size // max(1, len(first.result.hosts)))
        workers = min(_MAX_WORKERS, max(_MIN_WORKERS, self.host.cores // ranks))
        return replace(settings, patches={**settings.patches, "workers": workers})

    def _names(self, number: int) -> tuple[str, ...]:
        """Return the folders of a rung's runs in pairs, that of the rung below first.

        The first rung has no pairs, and at least two runs, as one does not show whether the script is reproducible.
        """
        kinds = ("",) if number == 1 else ("-below", "")
        turns = range(1, (count_base_runs(self.repeats) if number == 1 else self.repeats) + 1)
        return tuple(f"trials/{number:02}{kind}-{turn}" for turn in turns for kind in kinds)

    def _run(self, name: str, folder: str, settings: ScriptSettings) -> MeasuredRun:
        run = self.run_script(settings, self.folder / folder)
        self._wall_s += run.result.wall_s
        speed = f"{milliseconds(run.span_s)} per step" if not run.failure else f"failed: {run.failure}"
        self.report(f"{name}, run {folder.rpartition('-')[2]}: {speed}")
        return run

    def _decide(
        self, rung: ScriptRung, ratio: Interval, pairs: Sequence[tuple[MeasuredRun, MeasuredRun]]
    ) -> tuple[bool, str, ParityResult | None]:
        """Return whether a rung is kept, why, and whether it trains alike."""
        measured = format_paired_speedup(ratio)
        parity, caveat = None, ""
        if self._note:
            caveat = "; losses not compared"
        elif rung.parity == "same":
            parity, caveat = _compare_losses(pairs)
            if parity is not None and is_disqualifying(parity):
                return False, f"trains differently: {parity.why} ({measured})", parity
            if caveat == _NOT_FINITE:
                return False, f"trains differently: {caveat} ({measured})", None
            caveat = f"; {caveat}" if caveat else ""
        return *decide_by_speed(ratio, caveat, at_any_speed=rung.keep == "always"), parity


def _describe(name: str, explains: str, patch: tuple[str, ...], status: Any, why: str, **fields: Any) -> RungResult:
    return RungResult(name=name, explains=explains, patch=patch, status=status, why=why, **fields)


def count_base_runs(repeats: int) -> int:
    """Return the number of runs of the command as it is, below `repeats` pairs of each rung."""
    return max(2, repeats)


def _costs(pairs: Sequence[tuple[MeasuredRun, MeasuredRun]]) -> tuple[list[float], list[float]] | None:
    """Return the seconds per step of the baselines and of a rung; per sample if it changes the samples of a step.

    Return None if only some of the runs have a number of samples.
    """
    spans = [run.span_s for _, run in pairs], [run.span_s for run, _ in pairs]
    sizes = [_samples_per_step(run) for _, run in pairs], [_samples_per_step(run) for run, _ in pairs]
    known = [size for each in sizes for size in each if size]
    if not known:
        return spans
    if len(known) < 2 * len(pairs):
        return None
    # Loaders that request batches ahead differ by a batch or two in a short run.
    if max(known) <= _SAME_BATCH * min(known):
        return spans
    below, rung = (
        [span / (size or 1) for span, size in zip(*each, strict=True)] for each in zip(spans, sizes, strict=True)
    )
    return below, rung


def _samples_per_step(run: MeasuredRun) -> float | None:
    rate = run.result.samples_per_s
    return None if rate is None else rate * run.result.step_s


def _list_unapplied(rung: ScriptRung, run: MeasuredRun) -> dict[str, str]:
    """Return the patches of a rung that found no place in the script, and why."""
    return {name: reason for name, reason in run.unapplied.items() if name in rung.patch.values}


def _compare_losses(pairs: Sequence[tuple[MeasuredRun, MeasuredRun]]) -> tuple[ParityResult | None, str]:
    """Return whether a rung trains like its baseline, or None and why that is unknown; with a caveat."""
    means = [_mean_losses(candidate.losses, baseline.losses) for candidate, baseline in pairs]
    if any(each is None for each in means):
        return None, "losses not compared: none were seen of the same steps"
    candidates, baselines = zip(*(each for each in means if each is not None), strict=True)
    if not all(map(math.isfinite, baselines)):
        return None, "losses not compared: those of the rung below are not finite"
    if not all(map(math.isfinite, candidates)):
        return None, _NOT_FINITE
    if min(*candidates, *baselines) <= 0:
        return None, "losses not compared: they are not positive"
    parity = assess_parity(candidates, baselines)
    return parity, "" if parity.verdict == "same" else "not proved to train alike"


def _mean_losses(candidate: Mapping[int, float], baseline: Mapping[int, float]) -> tuple[float, float] | None:
    """Return the mean losses of two runs over the steps that both have; None without any."""
    steps = sorted(candidate.keys() & baseline.keys())
    if not steps:
        return None
    return fmean(candidate[step] for step in steps), fmean(baseline[step] for step in steps)


def _find_irreproducibility(runs: Sequence[MeasuredRun]) -> str:
    """Return why losses of different rungs cannot be compared, "" if runs of the same command have the same first."""
    first, *others = (run.losses for run in runs)
    for other in others:
        step = min(first.keys() & other.keys(), default=None)
        if step is not None and abs(other[step] - first[step]) > _SAME_LOSS * abs(first[step]):
            return NOT_REPRODUCIBLE
    return ""


def _summarize(runs: Sequence[MeasuredRun]) -> dict[str, Any]:
    results = [run.result for run in runs]
    rates = [
        each.samples_per_s * each.step_s / run.span_s
        for each, run in zip(results, runs, strict=True)
        if each.samples_per_s is not None and run.span_s
    ]
    names = dict.fromkeys(name for each in results for name in each.stages)
    has_rates = len(rates) == len(runs)
    return {
        "images_per_s": mean_interval(rates) if has_rates else None,
        "spread": (min(rates), max(rates)) if has_rates else None,
        "stages": {
            name: fmean(
                each.stages[name].device_s / max(1, each.measured_steps) if name in each.stages else 0.0
                for each in results
            )
            for name in names
        },
        "step_s": fmean(run.span_s for run in runs),
        "startup_s": fmean(each.start_up_s for each in results),
        "device_bytes": max((each.memory_bytes for each in results if each.memory_bytes is not None), default=None),
        "verdict": results[-1].verdict,
        "ranks": results[-1].world_size,
    }
