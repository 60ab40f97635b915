"""Search for the fastest settings of a recipe by successive halving.

A round is successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943) over the candidates of a space. A winner
is adopted only if an A/B test shows that it is faster and trains alike. The bottleneck of the new best run chooses the
candidates of the next round.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from paceline.core.errors import RecipeError
from paceline.core.experiments.tuning import TriedResult
from paceline.core.interval import Interval, mean_of, product_of
from paceline.core.results import RunResult, starved_note
from paceline.core.units import count
from paceline.lab.duel import GAIN, Bench, Duel, fight
from paceline.lab.entry import Entry
from paceline.lab.laying import lay
from paceline.lab.measuring import setting_of
from paceline.lab.moves import Move
from paceline.lab.pairs import rates
from paceline.lab.runner import TrialError
from paceline.lab.space import Space, grid_of
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe

WIDTH: Final = 8
"""Candidates per round; more would be compared with a baseline run that is too old."""
SLOWER: Final = 0.95
"""Ratio below which a candidate is not tried again on top of other settings."""
THE_RECIPE: Final = "the recipe"
_AGAIN: Final = "run it again on an idle machine"


@dataclass(frozen=True)
class Found:
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
    """Runs rounds until no candidate is left, or a `budget` of runs has no room for another round. Use once.

    `bench` runs the measured form of the recipe. `vary` returns that form with a patch applied, or None if the patch
    does not fit. `repeats` is the number of pairs of an A/B test; `say` receives progress lines.
    """

    bench: Bench
    space: Space
    vary: Callable[[Patch], Recipe | None]
    steps: int
    repeats: int
    budget: int | None
    say: Callable[[str], None]
    _best: Patch = field(default_factory=Patch)
    _names: list[str] = field(default_factory=list)
    _duels: list[Duel] = field(default_factory=list)
    _entries: list[Entry] = field(default_factory=list)
    _ratios: dict[str, float] = field(default_factory=dict)
    _over_best: set[str] = field(default_factory=set)
    _left: set[tuple[str, str]] = field(default_factory=set)
    _seen: dict[str, Move] = field(default_factory=dict)
    _rounds: int = 0
    _fights: int = 0

    def search(self) -> Found:
        """Return the best settings. Raise `TrialError` if the recipe itself cannot be run."""
        first = best = self._run_recipe()
        if starved := starved_note([first]):
            return self._found(first, best, f"{starved} as the recipe was measured, so nothing was tried ({_AGAIN})")
        base: RunResult | None = first  # just measured; later rounds measure their own baseline
        while moves := self._moves(best):
            room = self._room(0 if base is not None else 1)
            if room >= 1:
                ab_result = self._round(moves[:room], base)
            elif self._has_room_for_pairs():
                ab_result = self._at_once(moves[0])
            else:
                budget = count(self.budget or 0, "run")
                return self._found(first, best, f"the budget of {budget} leaves no room for another round")
            base = None
            if ab_result is not None:
                best = ab_result.challenger[-1]
        return self._found(first, best, "nothing is left to try that could be faster")

    def _found(self, first: RunResult, best_run: RunResult, stopped: str) -> Found:
        before = rates(self._duels[0].champion) if self._duels else [first.throughput.images_per_s]
        best = rates(self._duels[-1].challenger) if self._duels else before
        gains = [ab_result.ratio for ab_result in self._duels if ab_result.ratio is not None]
        return Found(
            patch=self._best,
            gain=product_of(gains) if gains else None,
            first=mean_of(before),
            best=mean_of(best),
            first_run=first,
            best_run=best_run,
            tried=tuple(entry.result() for entry in self._entries),
            trials=self.bench.num_runs,
            grid=grid_of(self._seen.values()),
            stopped=stopped + self._left_open(),
        )

    def _left_open(self) -> str:
        """Return a clause on the candidates that could not be decided because the cores were busy, or ""."""
        starved = sum(entry.status == "starved" for entry in self._entries)
        what = (
            f"{starved} of {count(len(self._entries), 'trial')} could not be decided, as other processes used the cores"
        )
        return f"; {what} ({_AGAIN})" if starved else ""

    def _room(self, num_bases: int) -> int:
        """Return the number of short runs that fit the budget, with `num_bases` baseline runs and an A/B test to
        follow.
        """
        if self.budget is None:
            return WIDTH
        return min(WIDTH, self.budget - self.bench.num_runs - num_bases - 2 * self.repeats)

    def _run_recipe(self) -> RunResult:
        result = self._run_best("recipe", self.steps)
        self.say(f"{THE_RECIPE}: {result.throughput.images_per_s:,.0f} images/s")
        return result

    def _run_best(self, name: str, steps: int) -> RunResult:
        """Run the best settings, as the baseline of others."""
        outcome = self.bench.make(name, self._best, steps, 1)
        if outcome.result is None:
            raise TrialError(outcome.error, outcome.code)
        return outcome.result

    def _moves(self, best: RunResult) -> list[Move]:
        """Return the candidates worth a run: not the slower ones, nor those tried on top of this best."""
        recipe = self.vary(self._best)
        assert recipe is not None, "the best fits its recipe"
        fitting = [move for move in self.space.moves(recipe, best) if self._over(move.patch) is not None]
        moves = [move for move in fitting if not self._is_way_back(move)]
        for move in moves:
            self._seen.setdefault(move.name, move)
        slower = {name for name, ratio in self._ratios.items() if ratio < SLOWER}
        left = [move for move in moves if move.name not in self._over_best | slower]
        return sorted(left, key=lambda move: -self._ratios.get(move.name, math.inf))  # new ones come first

    def _is_way_back(self, move: Move) -> bool:
        """Return whether the candidate only restores settings that were replaced by faster ones."""
        return all((path, str(value)) in self._left for path, value in move.patch.assignments)

    def _over(self, patch: Patch) -> Patch | None:
        """Return `patch` merged over the best, or None if they do not fit."""
        merged = self._laid(self._best, patch)
        return None if merged is None or self.vary(merged) is None else merged

    def _laid(self, below: Patch, added: Patch) -> Patch | None:
        try:
            return lay(self.bench.recipe, below, added)
        except RecipeError:
            return None

    def _at_once(self, move: Move) -> Duel | None:
        """Try one candidate by an A/B test only, if the budget has no room for a short run before it."""
        self._rounds += 1
        self._over_best.add(move.name)
        entry = self._entry(move)
        ab_result = self._fight(entry)
        is_valid = ab_result.status in (
            "won",
            "lost",
            "no_gain",
        )  # a candidate that fails would fail on top of other settings, too
        self._ratios[move.name] = entry.value if is_valid else 0.0
        return self._take(entry, ab_result, [entry]) if ab_result.status == "won" else None

    def _round(self, moves: Sequence[Move], base: RunResult | None) -> Duel | None:
        """Try candidates on top of the best, whose latest run is `base`; return the winning A/B test, or None."""
        self._rounds += 1
        self._over_best |= {move.name for move in moves}
        entries = [self._entry(move) for move in moves]
        self._compare(entries, self.steps, base)
        self._ratios |= {entry.move.name: entry.value for entry in entries}
        pool = sorted((entry for entry in entries if entry.may_win), key=lambda entry: -entry.value)
        return self._together(pool) or self._alone(pool)

    def _entry(self, move: Move) -> Entry:
        entry = Entry(move, " + ".join(self._names) or THE_RECIPE, self._rounds)
        self._entries.append(entry)
        return entry

    def _compare(self, entries: Sequence[Entry], steps: int, base: RunResult | None) -> None:
        """Run each candidate once, and the best before them unless `base` is given."""
        length = "" if steps == self.steps else "-longer"
        if base is None:
            base = self._run_best(f"round-{self._rounds}-best{length}", steps)
        for entry in entries:
            patch = self._over(entry.move.patch)
            assert patch is not None, f"{entry.move.name} was filtered out if it does not fit"
            name = f"round-{self._rounds}-{entry.move.name}{length}"
            entry.take_short(self.bench.make(name, patch, steps, 1), base, steps)
            self.say(f"{entry.move.name}: {entry.why}")

    def _together(self, pool: Sequence[Entry]) -> Duel | None:
        """Try all that look faster at once, the fastest of those that exclude each other: this saves rounds."""
        combined: list[Entry] = []
        patch = Patch()
        # A candidate with `parity: free` would hide whether the others still train alike.
        for entry in (each for each in pool if each.move.parity == "same"):
            merged = self._laid(patch, entry.move.patch)
            is_free = not any(entry.move.keys & part.move.keys for part in combined)
            if entry.value >= GAIN and is_free and merged is not None and self._over(merged) is not None:
                combined.append(entry)
                patch = merged
        if len(combined) < 2 or not self._has_room_for_pairs():
            return None
        entry = self._entry(_joined([part.move for part in combined], patch))
        ab_result = self._fight(entry)
        if ab_result.status == "won" and entry.value < SLOWER * combined[0].value:
            entry.status, entry.why = "lost", f"{entry.why}, less than {combined[0].move.name} alone"
        if entry.status != "won":
            return None
        for part in combined:
            part.status, part.why = "won", f"{part.why}; as a part of {entry.move.name}"
        return self._take(entry, ab_result, pool)

    def _alone(self, pool: list[Entry]) -> Duel | None:
        """Halve the pool, then run A/B tests one by one until one wins or the fastest is no faster."""
        num_half = -(-len(pool) // 2)
        half, rest = pool[:num_half], pool[num_half:]
        if len(half) > 1 and self._room(1) >= len(half):
            self._compare(half, 2 * self.steps, None)
        for entry in (*sorted(half, key=lambda each: -each.value), *rest):
            if not entry.may_win or not self._has_room_for_pairs():
                break
            ab_result = self._fight(entry)
            if ab_result.status == "won":
                return self._take(entry, ab_result, pool)
            if ab_result.status in ("lost", "no_gain", "starved"):
                break
            self._ratios[entry.move.name] = 0.0  # a candidate that fails would fail on top of other settings, too
        return None

    def _has_room_for_pairs(self) -> bool:
        return self.budget is None or self.bench.num_runs + 2 * self.repeats <= self.budget

    def _fight(self, entry: Entry) -> Duel:
        patch = self._over(entry.move.patch)
        assert patch is not None, f"{entry.move.name} was filtered out if it does not fit"
        before, steps = self.bench.num_runs, 2 * self.steps
        self._fights += 1
        names = (f"pairs-{self._fights}-best", f"pairs-{self._fights}-{entry.move.name}")
        must_match = entry.move.parity == "same"
        ab_result = fight(self.bench, names, (self._best, patch), steps=steps, repeats=self.repeats, is_same=must_match)
        entry.take_duel(ab_result, steps, self.bench.num_runs - before)
        self.say(f"{entry.move.name}, over {entry.over}: {entry.status.replace('_', ' ')}: {entry.why}")
        return ab_result

    def _take(self, entry: Entry, ab_result: Duel, pool: Sequence[Entry]) -> Duel:
        """Adopt a winner, and lower the expected ratio of the candidates that it excludes."""
        patch = self._over(entry.move.patch)
        assert patch is not None, "it was run"
        for other in pool:
            if other.status == "no_gain" and other.move.keys & entry.move.keys:
                rivals = [each for each in pool if each.status == "won" and each.move.keys & other.move.keys]
                self._ratios[other.move.name] = other.value / max(each.value for each in rivals)
                other.status, other.why = "lost", f"{other.why}, less than {rivals[0].move.name}"
            elif other.status == "no_gain" and other.value >= GAIN:
                other.why += "; left for the next round"
        before = self.vary(self._best)
        assert before is not None, "the best fits its recipe"
        self._left |= {(path, str(setting_of(before, path))) for path in entry.move.keys}
        self._best = patch
        self._names.append(entry.move.name)
        self._duels.append(ab_result)
        self._over_best.clear()
        return ab_result


def _joined(moves: Sequence[Move], patch: Patch) -> Move:
    return Move(" + ".join(move.name for move in moves), "all that looked faster, combined", patch, ())
