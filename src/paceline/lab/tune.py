"""Search for the fastest settings of a recipe by successive halving, and write the tuned recipe."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.results import TriedResult
from paceline.core.results import RunResult, starved_note
from paceline.core.run_dir import write_atomic
from paceline.core.statistics import Interval, mean_interval, product_interval, ratio_interval
from paceline.core.units import count, per_second
from paceline.lab.ab_test import (
    MIN_GAIN,
    ABResult,
    TrialBench,
    classify_failure,
    collect_throughputs,
    run_ab_test,
)
from paceline.lab.patches import get_setting, merge_patches
from paceline.lab.runner import TrialError
from paceline.lab.search_space import Candidate, SearchSpace, compute_grid_size
from paceline.lab.trial import TrialOutcome, format_patch
from paceline.recipe.load import PRESETS, Patch, find_recipe
from paceline.recipe.schema import Recipe

MAX_ROUND_CANDIDATES: Final = 8
"""Candidates per round; more would be compared with a baseline run that is too old."""
SLOWER_RATIO: Final = 0.95
"""Ratio below which a candidate is not tried again on top of other settings."""
RECIPE_NAME: Final = "the recipe"
_RERUN_ADVICE: Final = "run it again on an idle machine"


@dataclass
class TriedCandidate:
    """A candidate in a round: `patch` is the best at that time with the candidate on top, and `result` so far."""

    candidate: Candidate
    patch: Patch
    result: TriedResult

    @property
    def speedup(self) -> float:
        """Latest known speedup; 0 if it could not be run."""
        return 0.0 if self.result.ratio is None else self.result.ratio.value

    @property
    def can_win(self) -> bool:
        """Whether it was faster than its baseline, in valid runs."""
        return self.speedup > 1 and self.result.status != "starved"

    def update(self, **fields: Any) -> None:
        """Replace fields of the result."""
        self.result = self.result.model_copy(update=fields)

    def record_short_run(self, outcome: TrialOutcome, base: RunResult, steps: int) -> None:
        """Record a short run, compared with the run `base`."""
        self.update(trials=self.result.trials + 1, steps=steps)
        if outcome.result is None:
            status, why = classify_failure(outcome)
            self.update(ratio=None, status=status, why=why)
            return
        images_per_s = outcome.result.throughput.images_per_s
        ratio = ratio_interval([images_per_s], [base.throughput.images_per_s])
        status = "no_gain" if ratio.value > 1 / MIN_GAIN else "lost"
        why = f"{ratio.value:.2f}x in a run of {count(steps, 'step')}"
        if starved := starved_note((base, outcome.result)):
            status, why = "starved", f"unknown: {starved} ({why})"
        runs = (*self.result.runs, outcome.folder)
        self.update(runs=runs, images_per_s=images_per_s, ratio=ratio, status=status, why=why)

    def record_ab_test(self, ab_result: ABResult, steps: int, num_runs: int) -> None:
        """Record an A/B test of `num_runs` runs."""
        self.update(
            trials=self.result.trials + num_runs,
            steps=steps,
            runs=(*self.result.runs, *ab_result.runs),
            ratio=ab_result.ratio or self.result.ratio,
            parity=ab_result.parity,
            status=ab_result.status,
            why=ab_result.why,
        )
        if ab_result.candidate:
            self.update(images_per_s=mean_interval(collect_throughputs(ab_result.candidate)).value)


@dataclass(frozen=True)
class SearchResult:
    """Result of a search: `patch` is the best, and `gain` its speedup over the recipe (None: nothing won).

    `first` and `best` are images/s of the recipe and of the best, `first_run` and `best_run` one run of each. `trials`
    is the number of runs, and `grid` the number of settings in the space.
    """

    patch: Patch
    gain: Interval | None
    first: Interval
    best: Interval
    first_run: RunResult
    best_run: RunResult
    tried: tuple[TriedResult, ...]
    trials: int
    grid: int
    stopped: str


@dataclass
class Search:
    """Run rounds until no candidate is left, or a `budget` of runs has no room for another round. Use once.

    A round is successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943) over the candidates of `space`. A
    winner is adopted only if an A/B test shows that it is faster and trains alike.

    `bench` runs the measured form of the recipe. `apply_patch` returns that form with a patch applied, or None if the
    patch does not fit. `repeats` is the number of pairs of an A/B test; `report` receives progress lines.
    """

    bench: TrialBench
    space: SearchSpace
    apply_patch: Callable[[Patch], Recipe | None]
    steps: int
    repeats: int
    budget: int | None
    report: Callable[[str], None]
    _best: Patch = field(default_factory=Patch)
    _names: list[str] = field(default_factory=list)
    _wins: list[ABResult] = field(default_factory=list)
    _tried: list[TriedCandidate] = field(default_factory=list)
    _ratios: dict[str, float] = field(default_factory=dict)
    _tried_over_best: set[str] = field(default_factory=set)
    _replaced_settings: set[tuple[str, str]] = field(default_factory=set)
    _seen: dict[str, Candidate] = field(default_factory=dict)
    _num_rounds: int = 0
    _num_ab_tests: int = 0

    def search(self) -> SearchResult:
        """Return the best settings. Raise `TrialError` if the recipe itself cannot be run."""
        first = best = self._run_recipe()
        if starved := starved_note([first]):
            return self._build_result(
                first, best, f"{starved} as the recipe was measured, so nothing was tried ({_RERUN_ADVICE})"
            )
        base: RunResult | None = first  # just measured; later rounds measure their own baseline
        # The bottleneck of the new best run chooses the candidates of the next round.
        while candidates := self._list_candidates(best):
            room = self._count_affordable_runs(0 if base is not None else 1)
            if room >= 1:
                ab_result = self._run_round(candidates[:room], base)
            elif self._has_room_for_pairs():
                ab_result = self._try_pairs_only(candidates[0])
            else:
                budget = count(self.budget or 0, "run")
                return self._build_result(first, best, f"the budget of {budget} leaves no room for another round")
            base = None
            if ab_result is not None:
                best = ab_result.candidate[-1]
        return self._build_result(first, best, "nothing is left to try that could be faster")

    def _build_result(self, first: RunResult, best_run: RunResult, stopped: str) -> SearchResult:
        before = collect_throughputs(self._wins[0].baseline) if self._wins else [first.throughput.images_per_s]
        best = collect_throughputs(self._wins[-1].candidate) if self._wins else before
        gains = [ab_result.ratio for ab_result in self._wins if ab_result.ratio is not None]
        return SearchResult(
            patch=self._best,
            gain=product_interval(gains) if gains else None,
            first=mean_interval(before),
            best=mean_interval(best),
            first_run=first,
            best_run=best_run,
            tried=tuple(entry.result for entry in self._tried),
            trials=self.bench.num_runs,
            grid=compute_grid_size(self._seen.values()),
            stopped=stopped + self._format_undecided(),
        )

    def _format_undecided(self) -> str:
        starved = sum(entry.result.status == "starved" for entry in self._tried)
        what = (
            f"{starved} of {count(len(self._tried), 'trial')} could not be decided, as other processes used the cores"
        )
        return f"; {what} ({_RERUN_ADVICE})" if starved else ""

    def _count_affordable_runs(self, num_bases: int) -> int:
        """Return how many short runs fit the budget, besides `num_bases` baseline runs and an A/B test."""
        if self.budget is None:
            return MAX_ROUND_CANDIDATES
        return min(MAX_ROUND_CANDIDATES, self.budget - self.bench.num_runs - num_bases - 2 * self.repeats)

    def _run_recipe(self) -> RunResult:
        result = self._run_best("recipe", self.steps)
        self.report(f"{RECIPE_NAME}: {per_second(result.throughput.images_per_s)} images/s")
        return result

    def _run_best(self, name: str, steps: int) -> RunResult:
        outcome = self.bench.run_trial(name, self._best, steps, 1)
        if outcome.result is None:
            raise TrialError(outcome.error, outcome.exit_code)
        return outcome.result

    def _list_candidates(self, best: RunResult) -> list[Candidate]:
        candidates = [
            candidate
            for candidate in self.space(self._best_recipe, best)
            if self._merge_over_best(candidate.patch) is not None and not self._is_reverting(candidate)
        ]
        for candidate in candidates:
            self._seen.setdefault(candidate.name, candidate)
        # Slower candidates, and those tried on top of this best, are not worth another run.
        slower = {name for name, ratio in self._ratios.items() if ratio < SLOWER_RATIO}
        left = [candidate for candidate in candidates if candidate.name not in self._tried_over_best | slower]
        return sorted(left, key=lambda candidate: -self._ratios.get(candidate.name, math.inf))  # new ones come first

    @property
    def _best_recipe(self) -> Recipe:
        recipe = self.apply_patch(self._best)
        assert recipe is not None, "the best fits its recipe"
        return recipe

    def _is_reverting(self, candidate: Candidate) -> bool:
        # It would only restore settings that faster ones have replaced.
        return all((path, str(value)) in self._replaced_settings for path, value in candidate.patch.assignments)

    def _merge_over_best(self, patch: Patch) -> Patch | None:
        merged = self._try_merge(self._best, patch)
        return None if merged is None or self.apply_patch(merged) is None else merged

    def _try_merge(self, below: Patch, added: Patch) -> Patch | None:
        try:
            return merge_patches(self.bench.recipe, below, added)
        except RecipeError:
            return None

    def _try_pairs_only(self, candidate: Candidate) -> ABResult | None:
        self._num_rounds += 1
        self._tried_over_best.add(candidate.name)
        entry = self._add_candidate(candidate)
        ab_result = self._run_ab_test(entry)
        # A candidate that fails would fail on top of other settings, too.
        is_valid = ab_result.status in ("won", "lost", "no_gain")
        self._ratios[candidate.name] = entry.speedup if is_valid else 0.0
        return self._accept(entry, ab_result, [entry]) if ab_result.status == "won" else None

    def _run_round(self, candidates: Sequence[Candidate], base: RunResult | None) -> ABResult | None:
        """Try candidates on top of the best, whose latest run is `base`; return the winning A/B test."""
        self._num_rounds += 1
        self._tried_over_best |= {candidate.name for candidate in candidates}
        entries = [self._add_candidate(candidate) for candidate in candidates]
        self._run_short_trials(entries, self.steps, base)
        self._ratios |= {entry.candidate.name: entry.speedup for entry in entries}
        pool = sorted((entry for entry in entries if entry.can_win), key=lambda entry: -entry.speedup)
        return self._try_combined(pool) or self._try_one_by_one(pool)

    def _add_candidate(self, candidate: Candidate) -> TriedCandidate:
        patch = self._merge_over_best(candidate.patch)
        assert patch is not None, f"{candidate.name} was filtered out if it does not fit"
        result = TriedResult(
            name=candidate.name,
            patch=tuple(format_patch(candidate.patch)),
            over=" + ".join(self._names) or RECIPE_NAME,
            round=self._num_rounds,
            steps=0,
            trials=0,
            images_per_s=None,
            ratio=None,
            status="no_gain",
            why="",
            explains=candidate.explains,
        )
        self._tried.append(TriedCandidate(candidate, patch, result))
        return self._tried[-1]

    def _run_short_trials(self, entries: Sequence[TriedCandidate], steps: int, base: RunResult | None) -> None:
        length = "" if steps == self.steps else "-longer"
        if base is None:
            base = self._run_best(f"round-{self._num_rounds}-best{length}", steps)
        for entry in entries:
            name = f"round-{self._num_rounds}-{entry.candidate.name}{length}"
            entry.record_short_run(self.bench.run_trial(name, entry.patch, steps, 1), base, steps)
            self.report(f"{entry.candidate.name}: {entry.result.why}")

    def _try_combined(self, pool: Sequence[TriedCandidate]) -> ABResult | None:
        # Trying all that look faster at once saves rounds; of those that exclude each other take the fastest.
        combined: list[TriedCandidate] = []
        patch = Patch()
        # A candidate with `parity: free` would hide whether the others still train alike.
        for entry in (each for each in pool if each.candidate.parity == "same"):
            merged = self._try_merge(patch, entry.candidate.patch)
            is_free = not any(entry.candidate.paths & part.candidate.paths for part in combined)
            fits = merged is not None and self._merge_over_best(merged) is not None
            if entry.speedup >= MIN_GAIN and is_free and merged is not None and fits:
                combined.append(entry)
                patch = merged
        if len(combined) < 2 or not self._has_room_for_pairs():
            return None
        name = " + ".join(part.candidate.name for part in combined)
        entry = self._add_candidate(Candidate(name, "all that looked faster, combined", patch, ()))
        ab_result = self._run_ab_test(entry)
        if ab_result.status != "won":
            return None
        if entry.speedup < SLOWER_RATIO * combined[0].speedup:
            entry.update(status="lost", why=f"{entry.result.why}, less than {combined[0].candidate.name} alone")
            return None
        for part in combined:
            part.update(status="won", why=f"{part.result.why}; as a part of {name}")
        return self._accept(entry, ab_result, pool)

    def _try_one_by_one(self, pool: list[TriedCandidate]) -> ABResult | None:
        """Halve the pool, then run A/B tests until one wins or the fastest is no faster."""
        num_half = -(-len(pool) // 2)
        half, rest = pool[:num_half], pool[num_half:]
        if len(half) > 1 and self._count_affordable_runs(1) >= len(half):
            self._run_short_trials(half, 2 * self.steps, None)
        for entry in (*sorted(half, key=lambda each: -each.speedup), *rest):
            if not entry.can_win or not self._has_room_for_pairs():
                break
            ab_result = self._run_ab_test(entry)
            if ab_result.status == "won":
                return self._accept(entry, ab_result, pool)
            if ab_result.status in ("lost", "no_gain", "starved"):
                break
            self._ratios[entry.candidate.name] = 0.0  # a candidate that fails would fail on top of other settings, too
        return None

    def _has_room_for_pairs(self) -> bool:
        return self.budget is None or self.bench.num_runs + 2 * self.repeats <= self.budget

    def _run_ab_test(self, entry: TriedCandidate) -> ABResult:
        before, steps = self.bench.num_runs, 2 * self.steps
        self._num_ab_tests += 1
        names = (f"pairs-{self._num_ab_tests}-best", f"pairs-{self._num_ab_tests}-{entry.candidate.name}")
        must_match = entry.candidate.parity == "same"
        ab_result = run_ab_test(
            self.bench,
            names,
            (self._best, entry.patch),
            steps=steps,
            repeats=self.repeats,
            must_match_losses=must_match,
        )
        entry.record_ab_test(ab_result, steps, self.bench.num_runs - before)
        result = entry.result
        self.report(f"{result.name}, over {result.over}: {result.status.replace('_', ' ')}: {result.why}")
        return ab_result

    def _accept(self, entry: TriedCandidate, ab_result: ABResult, pool: Sequence[TriedCandidate]) -> ABResult:
        """Adopt a winner, and lower the expected ratio of the candidates that it excludes."""
        # A rival was compared with the old best; over the winner, which sets the same field, it is worth less.
        for other in (each for each in pool if each.result.status == "no_gain"):
            if other.candidate.paths & entry.candidate.paths:
                rivals = [
                    each
                    for each in pool
                    if each.result.status == "won" and each.candidate.paths & other.candidate.paths
                ]
                self._ratios[other.candidate.name] = other.speedup / max(each.speedup for each in rivals)
                other.update(status="lost", why=f"{other.result.why}, less than {rivals[0].candidate.name}")
            elif other.speedup >= MIN_GAIN:
                other.update(why=f"{other.result.why}; left for the next round")
        before = self._best_recipe
        self._replaced_settings |= {(path, str(get_setting(before, path))) for path in entry.candidate.paths}
        self._best = entry.patch
        self._names.append(entry.candidate.name)
        self._wins.append(ab_result)
        self._tried_over_best.clear()  # there is a new best to try them over
        return ab_result


def format_tuned_recipe(name: str, patch: Patch, comments: Mapping[str, str], header: str) -> str:
    """Return a recipe file: `patch` over the recipe `name`, with a comment at each dotted path in `comments`."""
    lines = [f"# {header}", f"extends: {json.dumps(_resolve_base(name), ensure_ascii=False)}"]
    return "\n".join([*lines, *_format_lines(patch.values(), comments, "", 0)]) + "\n"


def write_tuned_recipe(path: Path, text: str) -> None:
    """Write the file. Raise `PacelineError` if it cannot be written."""
    try:
        write_atomic(path, text)
    except OSError as error:
        raise PacelineError(f"{path}: cannot be written: {error.strerror} (free some room)") from None


def _resolve_base(name: str) -> str:
    # `extends` must stay valid if the file is moved.
    path = find_recipe(name)
    return name if path.is_relative_to(PRESETS) else str(path.resolve())


def _format_lines(values: Mapping[str, Any], comments: Mapping[str, str], above: str, depth: int) -> Iterator[str]:
    for key, value in values.items():
        path, indent = f"{above}{key}", "  " * depth
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from _format_lines(value, comments, f"{path}.", depth + 1)
            continue
        comment = f"  # {comments[path]}" if path in comments else ""
        yield f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}{comment}"  # JSON is YAML too
