"""Measure a ladder: compare each rung with the last one kept, in pairs of fresh runs."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.results import RungResult
from paceline.core.results import RunResult, starved_note
from paceline.core.run_dir import RunDir
from paceline.core.statistics import Interval
from paceline.core.units import count, share
from paceline.lab.ab_test import collect_results, format_failure, run_pair, run_pairs
from paceline.lab.ladder_file import Ladder, Rung
from paceline.lab.patches import SOURCE_SECTION, build_source_patch, drop_section, merge_patches
from paceline.lab.prepare_data import DataForm, PreparedData
from paceline.lab.rung_result import build_first_result, build_rung_result, build_unmeasured_result
from paceline.lab.runner import TrialError, TrialRunner
from paceline.lab.search_space import MIN_CEILING, Hardware, find_next_candidate, list_candidates, parse_ceiling
from paceline.lab.trial import Trial, TrialOutcome, apply_patch
from paceline.recipe.load import Patch
from paceline.recipe.plan import divide_batch, resolve_batch
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.source import Lmdb, Pack

_EXIT_REFUSED: Final = 2
_EXIT_INTERNAL_ERROR: Final = 1


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
class RungDataset:
    """The section that reads data prepared for a rung (None: no data), and the seconds of the preparation."""

    section: Pack | Lmdb | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class LadderOutcome:
    """Results of a measured ladder: its rungs, the best state, and why an open-ended ladder stopped."""

    rungs: tuple[RungResult, ...]
    best: LadderState
    stopped: str


@dataclass(frozen=True)
class LadderRunner:
    """Measure `ladder` over `recipe`, in pairs of runs; `report` receives progress lines.

    `prepare` makes data, `propose` finds rungs above the last one, and run directories are named relative to `root`.
    """

    ladder: Ladder
    recipe: Recipe
    runner: TrialRunner
    hardware: LadderHardware
    repeats: int
    root: Path
    prepare: Callable[[DataForm], PreparedData]
    propose: RungProposer
    report: Callable[[str], None]
    _timed_forms: set[DataForm] = field(default_factory=set, init=False, repr=False)

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
        run_candidate = partial(self._run_trial, _build_trial(number, rung.name, state, rung))
        if number == 1:
            outcomes = {True: run_candidate(turn)}
        else:
            outcomes = run_pair(
                partial(self._run_trial, _build_trial(number, "below", below, rung)), run_candidate, turn
            )
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
                state, _ = self._stack_rung(rung, below, self._prepare_data(rung, below))
            except PacelineError as error:
                if not below.name:  # the first rung, without which there is no ladder
                    raise self._build_rung_error(rung, str(error), error.exit_code) from None
                why = str(error)
        return below, why or state

    @property
    def _initial_state(self) -> LadderState:
        return LadderState("", Patch(), self.hardware.ranks, is_cold=False)

    def _measure_first(self, rung: Rung) -> tuple[LadderState, RungResult]:
        try:
            dataset = self._prepare_data(rung, self._initial_state)
            state, added = self._stack_rung(rung, self._initial_state, dataset)
        except PacelineError as error:
            raise self._build_rung_error(rung, str(error), error.exit_code) from None
        trial = _build_trial(1, rung.name, state, rung)
        outcomes: list[TrialOutcome] = []
        # Nothing can be compared if the baseline of all rungs fails, so an error ends the ladder.
        for repeat in range(1, self.repeats + 1):
            outcome = self._run_trial(trial, repeat)
            if outcome.result is None:
                raise self._build_trial_error(rung, outcome)
            outcomes.append(outcome)
        recipe = apply_patch(self.recipe, state.patch)
        result = build_first_result(rung, added, outcomes, prepare_s=dataset.seconds, root=self.root, recipe=recipe)
        return replace(state, results=collect_results(outcomes)), result

    def _measure_next(self, rung: Rung, number: int, below: LadderState) -> tuple[LadderState, RungResult]:
        dataset = RungDataset()
        try:
            dataset = self._prepare_data(rung, below)
            state, added = self._stack_rung(rung, below, dataset)
        except PacelineError as error:
            result = build_unmeasured_result(rung, below.name, "left_out", str(error), prepare_s=dataset.seconds)
            return self._report_result(below, result)
        candidate, baseline = (
            _build_trial(number, rung.name, state, rung),
            _build_trial(number, "below", below, rung),
        )
        pairs = run_pairs(partial(self._run_trial, baseline), partial(self._run_trial, candidate), self.repeats)
        if pairs.failed is not None:
            is_refused = pairs.is_candidate and pairs.failed.exit_code == _EXIT_REFUSED
            complaint = format_failure(pairs.failed)
            why = complaint if pairs.is_candidate else f"{below.name}: {complaint}"
            status: Literal["left_out", "failed"] = "left_out" if is_refused else "failed"
            return self._report_result(
                below, build_unmeasured_result(rung, below.name, status, why, added, prepare_s=dataset.seconds)
            )
        result = build_rung_result(
            rung,
            added,
            pairs,
            baseline=below.name,
            ratios_below=below.ratios,
            prepare_s=dataset.seconds,
            root=self.root,
            recipe=apply_patch(self.recipe, state.patch),
        )
        # A dropped rung still refreshes the baseline: its pairs ran the state below it just now.
        if result.status != "kept" or result.over_below is None:
            return self._report_result(replace(below, results=collect_results(pairs.baselines)), result)
        ratios = (*below.ratios, result.over_below)
        kept = replace(state, results=collect_results(pairs.candidates), ratios=ratios, tried=below.tried)
        return self._report_result(kept, result)

    def _prepare_data(self, rung: Rung, below: LadderState) -> RungDataset:
        _check_hardware(rung, rung.ranks or below.ranks, self.hardware, self.recipe.parallel.device)
        match rung.data:
            case "none" | "source":
                return RungDataset()
        prepared = self.prepare(rung.data)
        seconds = 0.0 if rung.data in self._timed_forms else prepared.seconds  # count the preparation once
        self._timed_forms.add(rung.data)
        return RungDataset(prepared.section, seconds)

    def _stack_rung(self, rung: Rung, below: LadderState, dataset: RungDataset) -> tuple[LadderState, Patch]:
        ranks = rung.ranks or below.ranks
        patch, added = stack_patch(self.recipe, below.patch, rung, dataset.section)
        recipe = apply_patch(self.recipe, patch)
        divide_batch(resolve_batch(recipe, ranks), ranks)
        stacked_state = LadderState(rung.name, patch, ranks, is_cold=rung.cache == "cold")
        is_same = recipe.hash == apply_patch(self.recipe, below.patch).hash
        if below.name and is_same and (stacked_state.ranks, stacked_state.is_cold) == (below.ranks, below.is_cold):
            raise RecipeError(f"changes nothing: {below.name} already has all of it on this machine")
        return stacked_state, added

    def _run_trial(self, trial: Trial, repeat: int) -> TrialOutcome:
        # Both sides of a pair get the same seed, and so the same samples.
        seed = self.recipe.seed + repeat - 1
        seeded = replace(trial, patch=merge_patches(self.recipe, trial.patch, Patch((("seed", seed),))))
        try:
            outcome = self.runner.run(seeded, repeat)
        except TrialError:  # another process is writing this run: fatal, not a property of the trial
            raise
        except PacelineError as error:  # before the run: a cache that cannot be cold, or missing data
            rundir = RunDir(self.runner.get_folder(seeded, repeat))
            outcome = TrialOutcome(seeded, repeat, rundir, None, str(error), error.exit_code)
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


def _build_trial(number: int, name: str, state: LadderState, rung: Rung) -> Trial:
    # The baseline runs again for each rung, so its runs are named after the rung.
    return Trial(
        f"{number:02} {name}",
        state.patch,
        explains=rung.explains,
        expects=rung.expects,
        ranks=state.ranks,
        is_cold=state.is_cold,
    )


def _format_outcome(outcome: TrialOutcome, repeats: int) -> str:
    known = ", known" if outcome.is_reused else ""
    name = f"{outcome.trial.name}, run {outcome.repeat} of {repeats}{known}"
    if outcome.result is None:
        return f"{name}: failed: {outcome.error}"
    return f"{name}: {outcome.result.throughput.images_per_s:,.0f} images/s"


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
