"""Measure a ladder: compare each rung with the last one kept, in pairs of fresh runs, and keep or drop it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.ladder import RungResult
from paceline.core.interval import Interval
from paceline.core.results import RunResult
from paceline.core.rundir import RunDir
from paceline.core.units import count
from paceline.lab.laying import SOURCE, lay, reading, without
from paceline.lab.pairs import complaint_of, results_of, run_pair, run_pairs
from paceline.lab.prepared import Form, Prepared
from paceline.lab.rung_result import first_result, judged, unmeasured
from paceline.lab.rungs import Ladder, Rung
from paceline.lab.runner import Runner, TrialError
from paceline.lab.trial import Outcome, Trial, vary
from paceline.recipe.patch import Patch
from paceline.recipe.plan import divide_batch, resolve_batch
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.source import Lmdb, Pack

_REFUSED: Final = 2
_BUG: Final = 1


@dataclass(frozen=True)
class Standing:
    """State of the ladder: the last rung kept, its cumulative patch, and its measurements.

    `ratios` are those of the rungs up to it, each over its baseline. `results` are of its latest runs.
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


Propose = Callable[[Recipe, Standing], Rung | str]
"""Returns the next rung, or the reason why there is none."""


@dataclass(frozen=True)
class Here:
    """Hardware for the ladder: numbers of GPUs and CPU cores, and the ranks that the user requested."""

    gpus: int
    cores: int
    ranks: int


@dataclass(frozen=True)
class Made:
    """The section that reads data prepared for a rung (None: no data), and the seconds that took."""

    section: Pack | Lmdb | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Climbed:
    """Results of a measured ladder: its rungs, the best state, and why `auto` stopped."""

    rungs: tuple[RungResult, ...]
    best: Standing
    stopped: str


@dataclass(frozen=True)
class Climber:
    """Measures `ladder` over `recipe`, in pairs of runs; `say` receives progress lines.

    `prepare` makes data, `propose` finds rungs above the last one, and run directories are named relative to `root`.
    """

    ladder: Ladder
    recipe: Recipe
    runner: Runner
    here: Here
    repeats: int
    root: Path
    prepare: Callable[[Form], Prepared]
    propose: Propose
    say: Callable[[str], None]
    _charged: set[Form] = field(default_factory=set, init=False, repr=False)

    def climb(self) -> Climbed:
        """Measure all rungs. Raise `TrialError` if the first fails, as nothing can be compared then."""
        standing, result = self._first(self.ladder.rungs[0])
        rungs = [result]
        for rung in self.ladder.rungs[1:]:
            standing, result = self._next(rung, len(rungs) + 1, standing)
            rungs.append(result)
        stopped = ""
        while self.ladder.goes_on and not stopped:
            recipe = resolve_batch(vary(self.recipe, standing.patch), standing.ranks)
            proposed = self.propose(recipe, standing)
            if isinstance(proposed, str):
                stopped = proposed
                self.say(f"no further: {stopped}")
                continue
            standing, result = self._next(proposed, len(rungs) + 1, standing)
            standing = replace(standing, tried=(*standing.tried, proposed.name))
            rungs.append(result)
        return Climbed(tuple(rungs), standing, stopped)

    def run_turn(self, number: int, turn: int) -> tuple[Outcome, ...]:
        """Run one turn of rung `number`, both counted from 1, without deciding; return its runs, () if it does not fit.

        Raise `TrialError` if a run fails, unless it refuses the rung itself.
        """
        rung, (below, standing) = self.ladder.rungs[number - 1], self._assumed(number)
        # Assume that all lower rungs that fit are kept: if they are, `climb` reuses these runs.
        if isinstance(standing, str):
            self.say(f"{rung.name}: left out: {standing}")
            return ()
        run_candidate = partial(self._run, _trial(number, rung.name, standing, rung))
        if number == 1:
            outcomes = {True: run_candidate(turn)}
        else:
            outcomes = run_pair(partial(self._run, _trial(number, "below", below, rung)), run_candidate, turn)
        for is_candidate, outcome in outcomes.items():
            is_refused = is_candidate and number > 1 and outcome.code == _REFUSED
            if outcome.result is None and not is_refused:
                raise self._failed(rung, outcome)
        return tuple(outcomes.values())

    def _assumed(self, number: int) -> tuple[Standing, Standing | str]:
        """Return the state below rung `number` if all lower rungs are kept, and the rung's state or why it does not
        fit.
        """
        below, standing, why = self._ground, self._ground, ""
        for rung in self.ladder.rungs[:number]:
            below, why = standing, ""
            try:
                standing, _ = self._laid(rung, below, self._data(rung, below))
            except PacelineError as error:
                if not below.name:  # the first rung, without which there is no ladder
                    raise self._lost(rung, str(error), error.exit_code) from None
                why = str(error)
        return below, why or standing

    @property
    def _ground(self) -> Standing:
        return Standing("", Patch(), self.here.ranks, is_cold=False)

    def _first(self, rung: Rung) -> tuple[Standing, RungResult]:
        """Measure the first rung, the baseline of all others."""
        try:
            made = self._data(rung, self._ground)
            standing, added = self._laid(rung, self._ground, made)
        except PacelineError as error:
            raise self._lost(rung, str(error), error.exit_code) from None
        trial = _trial(1, rung.name, standing, rung)
        outcomes: list[Outcome] = []
        for repeat in range(1, self.repeats + 1):
            outcome = self._run(trial, repeat)
            if outcome.result is None:
                raise self._failed(rung, outcome)
            outcomes.append(outcome)
        recipe = vary(self.recipe, standing.patch)
        result = first_result(rung, added, outcomes, prepare_s=made.seconds, root=self.root, recipe=recipe)
        return replace(standing, results=results_of(outcomes)), result

    def _next(self, rung: Rung, number: int, below: Standing) -> tuple[Standing, RungResult]:
        """Measure a rung; return the new state and the rung's result."""
        made = Made()
        try:
            made = self._data(rung, below)
            standing, added = self._laid(rung, below, made)
        except PacelineError as error:
            result = unmeasured(rung, below.name, "left_out", str(error), prepare_s=made.seconds)
            return self._told(below, result)
        ours, theirs = _trial(number, rung.name, standing, rung), _trial(number, "below", below, rung)
        pairs = run_pairs(partial(self._run, theirs), partial(self._run, ours), self.repeats)
        if pairs.failed is not None:
            is_refused = pairs.is_here and pairs.failed.code == _REFUSED
            complaint = complaint_of(pairs.failed)
            why = complaint if pairs.is_here else f"{below.name}: {complaint}"
            status: Literal["left_out", "failed"] = "left_out" if is_refused else "failed"
            return self._told(below, unmeasured(rung, below.name, status, why, added, prepare_s=made.seconds))
        result = judged(
            rung,
            added,
            pairs,
            below=below.name,
            ratios=below.ratios,
            prepare_s=made.seconds,
            root=self.root,
            recipe=vary(self.recipe, standing.patch),
        )
        if result.status != "kept" or result.over_below is None:
            return self._told(replace(below, results=results_of(pairs.below)), result)
        ratios = (*below.ratios, result.over_below)
        kept = replace(standing, results=results_of(pairs.here), ratios=ratios, tried=below.tried)
        return self._told(kept, result)

    def _data(self, rung: Rung, below: Standing) -> Made:
        """Return the data prepared for a rung. Raise `PacelineError` if the rung does not fit this machine."""
        _refuse_elsewhere(rung, rung.ranks or below.ranks, self.here, self.recipe)
        match rung.data:
            case "none" | "source":
                return Made()
        prepared = self.prepare(rung.data)
        seconds = 0.0 if rung.data in self._charged else prepared.seconds  # count the preparation once
        self._charged.add(rung.data)
        return Made(prepared.section, seconds)

    def _laid(self, rung: Rung, below: Standing, made: Made) -> tuple[Standing, Patch]:
        """Return the state with a rung on top of `below`, and the patch it adds.

        Raise `PacelineError` if it does not fit the recipe or `below`.
        """
        ranks = rung.ranks or below.ranks
        patch, added = stacked(self.recipe, below.patch, rung, made.section)
        recipe = vary(self.recipe, patch)
        divide_batch(resolve_batch(recipe, ranks), ranks)
        stacked_state = Standing(rung.name, patch, ranks, is_cold=rung.cache == "cold")
        is_same = recipe.hash == vary(self.recipe, below.patch).hash
        if below.name and is_same and (stacked_state.ranks, stacked_state.is_cold) == (below.ranks, below.is_cold):
            raise RecipeError(f"changes nothing: {below.name} already has all of it on this machine")
        return stacked_state, added

    def _run(self, trial: Trial, repeat: int) -> Outcome:
        """Run a trial with the seed of its pair, so that both sides train on the same samples."""
        seed = self.recipe.seed + repeat - 1
        seeded = replace(trial, patch=lay(self.recipe, trial.patch, Patch((("seed", seed),))))
        try:
            outcome = self.runner.run(seeded, repeat)
        except TrialError:  # another process writes this run
            raise
        except PacelineError as error:  # before the run: a cache that cannot be cold, or missing data
            rundir = RunDir(self.runner.place(seeded, repeat))
            outcome = Outcome(seeded, repeat, rundir, None, str(error), error.exit_code)
        self.say(_line(outcome, self.repeats))
        return outcome

    def _failed(self, rung: Rung, outcome: Outcome) -> TrialError:
        if outcome.code == _BUG and outcome.said:  # an internal error: report its traceback, too
            self.say(outcome.said)
        return self._lost(rung, outcome.error, outcome.code)

    def _lost(self, rung: Rung, why: str, code: int) -> TrialError:
        return TrialError(f"{self.ladder.name}: {rung.name}: {why}", code)

    def _told(self, standing: Standing, result: RungResult) -> tuple[Standing, RungResult]:
        self.say(f"{result.name}: {result.status.replace('_', ' ')}: {result.why}")
        return standing, result


def stacked(recipe: Recipe, below: Patch, rung: Rung, section: Pack | Lmdb | None) -> tuple[Patch, Patch]:
    """Return a rung on top of `below`, and what it adds: its settings, and the `section` that reads its data.

    Its batch size is a multiple of that of `recipe`. Raise `RecipeError` if `below` does not fit `recipe`.
    """
    base = below if rung.data == "none" else without(below, SOURCE)
    source = Patch() if section is None else reading(section)
    added = Patch((*source.assignments, *rung.patch.assignments))
    if rung.batch_factor is not None:
        batch_size = rung.batch_factor * resolve_batch(recipe, 1).data.global_batch_size
        added = Patch((*added.assignments, ("data.batch_size", batch_size)))
    return lay(recipe, base, added), added


def _refuse_elsewhere(rung: Rung, ranks: int, hardware: Here, recipe: Recipe) -> None:
    gpus = 0 if recipe.parallel.device == "cpu" else hardware.gpus
    where = (
        "with a GPU, but there is none" if recipe.parallel.device != "cpu" else "with a GPU (parallel.device is cpu)"
    )
    if rung.on == "cuda" and not gpus:
        raise RecipeError(f"only helps {where}")
    if rung.on == "cpu" and gpus:
        raise RecipeError("only helps without a GPU")
    if rung.on == "ranks" and ranks == 1:
        raise RecipeError("only helps with more than one rank (add --ranks 2)")
    available, noun = (gpus, "GPU") if gpus else (hardware.cores, "core")
    if ranks > available:
        raise RecipeError(f"needs {count(ranks, noun)} ({available} here)")


def _trial(number: int, name: str, standing: Standing, rung: Rung) -> Trial:
    """Return the trial of one side of a rung. The baseline is run again for each rung, under the rung's number."""
    return Trial(
        f"{number:02} {name}",
        standing.patch,
        explains=rung.explains,
        expects=rung.expects,
        ranks=standing.ranks,
        is_cold=standing.is_cold,
    )


def _line(outcome: Outcome, repeats: int) -> str:
    known = ", known" if outcome.is_known else ""
    name = f"{outcome.trial.name}, run {outcome.repeat} of {repeats}{known}"
    if outcome.result is None:
        return f"{name}: failed: {outcome.error}"
    return f"{name}: {outcome.result.throughput.images_per_s:,.0f} images/s"
