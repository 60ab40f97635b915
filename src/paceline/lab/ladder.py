"""Measure a ladder: compare each rung with the last one kept, in pairs of fresh runs, and decide whether it is kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.results import ParityResult, RungResult
from paceline.core.results import RunResult, epoch_seconds, stage_seconds, starved_note, throughput_spread
from paceline.core.run_dir import RunDir
from paceline.core.statistics import Interval, mean_interval, product_interval
from paceline.core.units import count, per_second, share
from paceline.lab.ab_test import (
    PairedRuns,
    collect_results,
    collect_throughputs,
    decide_by_speed,
    format_failure,
    format_paired_speedup,
    format_parity_caveat,
    is_disqualifying,
    run_pair,
    run_pairs,
)
from paceline.lab.ladder_file import Ladder, Rung
from paceline.lab.patches import SOURCE_SECTION, build_source_patch, drop_section, merge_patches
from paceline.lab.runner import TrialError, TrialRunner
from paceline.lab.search_space import MIN_CEILING, Hardware, find_next_candidate, list_candidates, parse_ceiling
from paceline.lab.trial import Trial, TrialOutcome, apply_patch, format_patch
from paceline.recipe.load import Patch
from paceline.recipe.plan import divide_batch, resolve_batch
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.source import Lmdb, Pack

if TYPE_CHECKING:
    from paceline.lab.prepare_data import DataForm, PreparedData

_EXIT_REFUSED: Final = 2
_EXIT_INTERNAL_ERROR: Final = 1
_FIRST_RUNG_REASON: Final = "the first, the baseline of all others"


@dataclass(frozen=True)
class LadderState:
    """The last rung kept, with its cumulative patch and its measurements.

    `ratios` are those of the rungs up to it, each over its baseline; `results` are of its latest runs.
    """

    name: str
    patch: Patch
    ranks: int
    is_cold: bool
    results: tuple[RunResult, ...] = ()
    # The speedup over the first rung is the product of paired ratios. Comparing directly would mix runs half an hour
    # apart, over which a machine drifts (clocks, heat, neighbors).
    ratios: tuple[Interval, ...] = ()
    tried: tuple[str, ...] = ()


RungProposer = Callable[[Recipe, LadderState], Rung | str]
"""Returns the next rung, or the reason why there is none."""


@dataclass(frozen=True)
class LadderHardware:
    """Numbers of GPUs and CPU cores, and the ranks that the user requested."""

    gpus: int
    cores: int
    ranks: int


@dataclass(frozen=True)
class LadderOutcome:
    """Results of a measured ladder: its rungs, the best state, and why an open-ended ladder stopped."""

    rungs: tuple[RungResult, ...]
    best: LadderState
    stopped: str


@dataclass(frozen=True)
class LadderRunner:
    """Measure `ladder` over `recipe`, in pairs of runs; `report` receives progress lines.

    `prepare` makes data, and `propose` finds rungs above the last one.
    """

    ladder: Ladder
    recipe: Recipe
    runner: TrialRunner
    hardware: LadderHardware
    repeats: int
    prepare: "Callable[[DataForm], PreparedData]"
    propose: RungProposer
    report: Callable[[str], None]
    _timed_forms: "set[DataForm]" = field(default_factory=set, init=False, repr=False)

    def run(self) -> LadderOutcome:
        """Measure all rungs. Raise `TrialError` if the first fails."""
        state, result = self._measure_first(self.ladder.rungs[0])
        rungs = [result]
        for rung in self.ladder.rungs[1:]:
            state, result = self._measure_next(rung, len(rungs) + 1, state)
            rungs.append(result)
        stopped = ""
        while self.ladder.is_open_ended and not stopped:
            recipe = resolve_batch(apply_patch(self.recipe, state.patch), state.ranks)
            proposed = self.propose(recipe, state)
            if isinstance(proposed, str):
                stopped = proposed
                self.report(f"no further: {stopped}")
                continue
            state, result = self._measure_next(proposed, len(rungs) + 1, state)
            state = replace(state, tried=(*state.tried, proposed.name))
            rungs.append(result)
        return LadderOutcome(tuple(rungs), state, stopped)

    def run_task(self, number: int, turn: int) -> tuple[TrialOutcome, ...]:
        """Run one turn of rung `number`, both counted from 1; return its runs, () if the rung does not fit.

        Raise `TrialError` if a run fails, unless it refuses the rung itself.
        """
        rung, (below, state) = self.ladder.rungs[number - 1], self._assume_kept(number)
        # Assume that all lower rungs that fit are kept: if they are, `run` reuses these runs.
        if isinstance(state, str):
            self.report(f"{rung.name}: left out: {state}")
            return ()
        baseline, candidate = self._plan_pair(number, rung, below, state)
        outcomes = {True: candidate(turn)} if number == 1 else run_pair(baseline, candidate, turn)
        for is_candidate, outcome in outcomes.items():
            is_refused = is_candidate and number > 1 and outcome.exit_code == _EXIT_REFUSED
            if outcome.result is None and not is_refused:
                raise self._build_trial_error(rung, outcome)
        return tuple(outcomes.values())

    def _assume_kept(self, number: int) -> tuple[LadderState, LadderState | str]:
        """Return the state below rung `number` if all lower rungs are kept, and the rung's state or why it fails."""
        below, state, why = self._initial_state, self._initial_state, ""
        for rung in self.ladder.rungs[:number]:
            below, why = state, ""
            try:
                state, _ = self._stack_rung(rung, below, self._prepare_data(rung, below)[0])
            except PacelineError as error:
                if not below.name:  # the first rung, without which there is no ladder
                    raise self._build_rung_error(rung, str(error), error.exit_code) from None
                why = str(error)
        return below, why or state

    @property
    def _initial_state(self) -> LadderState:
        return LadderState("", Patch(), self.hardware.ranks, is_cold=False)

    def _measure_first(self, rung: Rung) -> tuple[LadderState, RungResult]:
        below = self._initial_state
        try:
            section, prepare_s = self._prepare_data(rung, below)
            state, added = self._stack_rung(rung, below, section)
        except PacelineError as error:
            raise self._build_rung_error(rung, str(error), error.exit_code) from None
        _, run_first = self._plan_pair(1, rung, below, state)
        outcomes: list[TrialOutcome] = []
        # Nothing can be compared if the baseline of all rungs fails, so an error ends the ladder.
        for repeat in range(1, self.repeats + 1):
            outcomes.append(run_first(repeat))
            if outcomes[-1].result is None:
                raise self._build_trial_error(rung, outcomes[-1])
        results = collect_results(outcomes)
        result = _describe_rung(
            rung,
            added,
            status="kept",
            why=_FIRST_RUNG_REASON,
            starved=starved_note(results),
            prepare_s=prepare_s,
            runs=tuple(each.folder for each in outcomes),
            **_summarize_runs(results, self._get_batch_size(state, results)),
        )
        return replace(state, results=results), result

    def _measure_next(self, rung: Rung, number: int, below: LadderState) -> tuple[LadderState, RungResult]:
        prepare_s = 0.0
        try:
            section, prepare_s = self._prepare_data(rung, below)
            state, added = self._stack_rung(rung, below, section)
        except PacelineError as error:
            result = _describe_rung(
                rung, rung.patch, status="left_out", why=str(error), below=below.name, prepare_s=prepare_s
            )
            return self._report_result(below, result)
        pairs = run_pairs(*self._plan_pair(number, rung, below, state), self.repeats)
        if pairs.failed is not None:
            is_refused = pairs.is_candidate and pairs.failed.exit_code == _EXIT_REFUSED
            why = (
                format_failure(pairs.failed) if pairs.is_candidate else f"{below.name}: {format_failure(pairs.failed)}"
            )
            status = "left_out" if is_refused else "failed"
            result = _describe_rung(rung, added, status=status, why=why, below=below.name, prepare_s=prepare_s)
            return self._report_result(below, result)
        batch_size = self._get_batch_size(state, pairs.candidate_results)
        measured = _evaluate_pairs(rung, pairs, batch_size, self.recipe.measure.warmup_steps)
        ratio = pairs.ratio
        over_first = product_interval([*below.ratios, ratio])
        result = _describe_rung(
            rung, added, below=below.name, prepare_s=prepare_s, over_below=ratio, over_first=over_first, **measured
        )
        # A dropped rung still refreshes the baseline: its pairs ran the state below it just now.
        if result.status != "kept":
            return self._report_result(replace(below, results=pairs.baseline_results), result)
        kept = replace(state, results=pairs.candidate_results, ratios=(*below.ratios, ratio), tried=below.tried)
        return self._report_result(kept, result)

    def _prepare_data(self, rung: Rung, below: LadderState) -> tuple[Pack | Lmdb | None, float]:
        """Return the section that reads data prepared for a rung (None: no data), and the seconds of preparation."""
        _check_hardware(rung, rung.ranks or below.ranks, self.hardware, self.recipe.parallel.device)
        match rung.data:
            case "none" | "source":
                return None, 0.0
        prepared = self.prepare(rung.data)
        seconds = 0.0 if rung.data in self._timed_forms else prepared.seconds  # count the preparation once
        self._timed_forms.add(rung.data)
        return prepared.section, seconds

    def _stack_rung(self, rung: Rung, below: LadderState, section: Pack | Lmdb | None) -> tuple[LadderState, Patch]:
        ranks = rung.ranks or below.ranks
        patch, added = stack_patch(self.recipe, below.patch, rung, section)
        recipe = apply_patch(self.recipe, patch)
        divide_batch(resolve_batch(recipe, ranks), ranks)
        stacked_state = LadderState(rung.name, patch, ranks, is_cold=rung.cache == "cold")
        is_same = recipe.hash == apply_patch(self.recipe, below.patch).hash
        if below.name and is_same and (stacked_state.ranks, stacked_state.is_cold) == (below.ranks, below.is_cold):
            raise RecipeError(f"changes nothing: {below.name} already has all of it on this machine")
        return stacked_state, added

    def _plan_pair(
        self, number: int, rung: Rung, below: LadderState, state: LadderState
    ) -> tuple[Callable[[int], TrialOutcome], Callable[[int], TrialOutcome]]:
        """Return what runs the baseline, and the rung, in a turn."""
        # The baseline runs again for each rung, so its runs are named after the rung. Both get the same seed, and so
        # the same samples.
        trials = (
            Trial(
                f"{number:02} {name}",
                each.patch,
                ranks=each.ranks,
                is_cold=each.is_cold,
                first_seed=self.recipe.seed,
            )
            for name, each in (("below", below), (rung.name, state))
        )
        baseline, candidate = (partial(self._run_trial, trial) for trial in trials)
        return baseline, candidate

    def _get_batch_size(self, state: LadderState, results: Sequence[RunResult]) -> int:
        return resolve_batch(apply_patch(self.recipe, state.patch), results[-1].world_size).data.global_batch_size

    def _run_trial(self, unseeded: Trial, repeat: int) -> TrialOutcome:
        trial = unseeded.in_turn(repeat)
        try:
            outcome = self.runner.run(trial, repeat)
        except TrialError:  # another process is writing this run: fatal, not a property of the trial
            raise
        except PacelineError as error:  # before the run: a cache that cannot be cold, or missing data
            rundir = RunDir(self.runner.get_folder(trial, repeat))
            outcome = TrialOutcome(trial, repeat, rundir, None, str(error), error.exit_code)
        self.report(_format_outcome(outcome, self.repeats))
        return outcome

    def _build_trial_error(self, rung: Rung, outcome: TrialOutcome) -> TrialError:
        if outcome.exit_code == _EXIT_INTERNAL_ERROR and outcome.stderr:  # an internal error: report its traceback, too
            self.report(outcome.stderr)
        return self._build_rung_error(rung, outcome.error, outcome.exit_code)

    def _build_rung_error(self, rung: Rung, why: str, code: int) -> TrialError:
        return TrialError(f"{self.ladder.name}: {rung.name}: {why}", code)

    def _report_result(self, state: LadderState, result: RungResult) -> tuple[LadderState, RungResult]:
        self.report(f"{result.name}: {result.status.replace('_', ' ')}: {result.why}")
        return state, result


def stack_patch(recipe: Recipe, below: Patch, rung: Rung, section: Pack | Lmdb | None) -> tuple[Patch, Patch]:
    """Return a rung on top of `below`, and what it adds: its settings, and the `section` that reads its data.

    Raise `RecipeError` if `below` does not fit `recipe`.
    """
    base = below if rung.data == "none" else drop_section(below, SOURCE_SECTION)
    source = Patch() if section is None else build_source_patch(section)
    added = Patch((*source.assignments, *rung.patch.assignments))
    if rung.batch_factor is not None:
        batch_size = rung.batch_factor * resolve_batch(recipe, 1).data.global_batch_size
        added = Patch((*added.assignments, ("data.batch_size", batch_size)))
    return merge_patches(recipe, base, added), added


def _check_hardware(rung: Rung, ranks: int, hardware: LadderHardware, device: str) -> None:
    gpus = 0 if device == "cpu" else hardware.gpus
    where = "with a GPU, but there is none" if device != "cpu" else "with a GPU (parallel.device is cpu)"
    if rung.on == "cuda" and not gpus:
        raise RecipeError(f"only helps {where}")
    if rung.on == "cpu" and gpus:
        raise RecipeError("only helps without a GPU")
    if rung.on == "ranks" and ranks == 1:
        raise RecipeError("only helps with more than one rank (add --ranks 2)")
    available, noun = (gpus, "GPU") if gpus else (hardware.cores, "core")
    if ranks > available:
        raise RecipeError(f"needs {count(ranks, noun)} ({available} here)")


def _describe_rung(rung: Rung, added: Patch, **fields: Any) -> RungResult:
    patch = tuple(format_patch(added))
    return RungResult(name=rung.name, explains=rung.explains, patch=patch, expects=rung.expects, **fields)


def _evaluate_pairs(rung: Rung, pairs: PairedRuns, batch_size: int, warmup_steps: int) -> dict[str, Any]:
    candidates, baselines = pairs.candidate_results, pairs.baseline_results
    parity = pairs.parity(warmup_steps) if rung.parity == "same" else None
    starved = starved_note((*candidates, *baselines))
    is_kept, why = _decide_if_kept(rung, pairs.ratio, parity, starved)
    stages, stages_below = _mean_stages(candidates), _mean_stages(baselines)
    return {
        "status": "kept" if is_kept else "dropped",
        "why": why,
        "starved": starved,
        "shrank": {name: (stages_below.get(name, 0.0), stages.get(name, 0.0)) for name in rung.expects},
        "parity": parity,
        "runs": tuple(each.folder for pair in zip(pairs.baselines, pairs.candidates, strict=True) for each in pair),
        **_summarize_runs(candidates, batch_size),
    }


def _decide_if_kept(rung: Rung, ratio: Interval, parity: ParityResult | None, starved: str) -> tuple[bool, str]:
    measured = format_paired_speedup(ratio)
    if parity is not None and is_disqualifying(parity):
        return False, f"trains differently: {parity.why} ({measured})"
    unproved = format_parity_caveat(parity) if rung.parity == "same" else ""
    # Nothing wins while other processes use the cores.
    if starved:
        advice = "run it again on an idle machine"
        kept_note = ", and kept at any speed" if rung.keep == "always" else ""
        return rung.keep == "always", f"unknown{kept_note}: {starved} ({advice}; {measured})"
    return decide_by_speed(ratio, unproved, at_any_speed=rung.keep == "always")


def _summarize_runs(results: Sequence[RunResult], batch_size: int) -> dict[str, Any]:
    speeds = collect_throughputs(results)
    images_per_s = mean_interval(speeds)
    # Memory is the maximum over runs: it must fit in each of them.
    memory = [result.memory for result in results if result.memory is not None]
    compiling = [result.account.compile_s for result in results if result.account is not None]
    return {
        "images_per_s": images_per_s,
        "spread": throughput_spread(results),
        "stages": _mean_stages(results),
        "step_s": fmean(batch_size / rate for rate in speeds),
        "epoch_s": epoch_seconds(results, images_per_s),
        "startup_s": fmean(result.time.startup_s for result in results),
        "compile_s": fmean(compiling) if compiling else None,
        "host_bytes": max((each.host_bytes for each in memory), default=None),
        "device_bytes": max((each.device_bytes for each in memory if each.device_bytes is not None), default=None),
        "verdict": results[-1].verdict,
        "ranks": results[-1].world_size,
    }


def _mean_stages(results: Sequence[RunResult]) -> dict[str, float]:
    """Return the device seconds per step of each stage: means over runs that measured steps."""
    counted = [result for result in results if result.account is not None and result.account.counted_steps]
    names = dict.fromkeys(name for result in counted for name in result.stages)
    return {name: fmean(stage_seconds(result, name) for result in counted) for name in names}


def _format_outcome(outcome: TrialOutcome, repeats: int) -> str:
    known = ", known" if outcome.is_reused else ""
    name = f"{outcome.trial.name}, run {outcome.repeat} of {repeats}{known}"
    if outcome.result is None:
        return f"{name}: failed: {outcome.error}"
    return f"{name}: {per_second(outcome.result.throughput.images_per_s)} images/s"


def propose_rung(recipe: Recipe, state: LadderState) -> Rung | str:
    """Return the next rung on top of `state`, whose recipe is `recipe`, or the reason why there is none."""
    result = state.results[-1]
    verdict = result.verdict
    if starved := starved_note(state.results):
        return f"{starved} as {state.name} was measured, so its bottleneck is unknown"
    bottleneck, ceiling = verdict["bottleneck"], parse_ceiling(verdict)
    # A few runs cannot prove a gain of a few percent.
    if ceiling is not None and ceiling < MIN_CEILING:
        return f"{state.name} is {bottleneck}, and removing that would gain less than {share(MIN_CEILING - 1)}"
    candidates = list_candidates(recipe, Hardware.from_result(result), verdict)
    candidate = find_next_candidate(candidates, bottleneck, state.tried)
    if candidate is None:
        return f"{state.name} is {bottleneck}, and no setting is left that may help"
    return Rung(
        name=candidate.name,
        explains=candidate.explains,
        set=dict(candidate.patch.assignments),
        expects=candidate.expects,
        parity=candidate.parity,
    )
