"""Search for the fastest settings of a recipe: short runs of all that is proposed, longer ones of what looks faster.

A round is successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943) over the moves of a space. What wins it is
laid over the recipe only when pairs of runs say that it is faster, and when it trains as before (`lab.duel`). What is
tried in the next round is said by the verdict of what won.
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
"""Moves of one round: with more of them the last would be compared with a run of long before."""
SLOWER: Final = 0.95
"""Ratio below which a move is not tried again over other settings, with which it may go better."""
THE_RECIPE: Final = "the recipe"
_AGAIN: Final = "run it again when nothing else runs here"


@dataclass(frozen=True)
class Found:
    """What a search has come to: `patch` is the best, and `gain` its speed over the recipe's (None: nothing won).

    `first` and `best` are images/s of the recipe and of the best, `first_run` and `best_run` a run of each. `trials`
    are runs in all, `grid` settings in the space that was looked at.
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
    """Runs rounds until nothing is left to try, or there is no room for another in a `budget` of runs.

    `bench` runs the measured form of the recipe that is tuned; `vary` returns that form with a patch over it, or None
    where the patch does not fit it or the recipe itself. `repeats` are the pairs that decide; `say` is told a line at a
    time. It searches once.
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
        """Return the best that was found. Raise `TrialError` when the recipe itself cannot be run."""
        first = best = self._run_recipe()
        if starved := starved_note([first]):
            return self._found(first, best, f"{starved} as the recipe was measured, so nothing was tried ({_AGAIN})")
        base: RunResult | None = first  # just measured; later rounds measure what they are compared with themselves
        while moves := self._moves(best):
            room = self._room(0 if base is not None else 1)
            if room >= 1:
                duel = self._round(moves[:room], base)
            elif self._has_room_for_pairs():
                duel = self._at_once(moves[0])
            else:
                budget = count(self.budget or 0, "run")
                return self._found(first, best, f"the budget of {budget} leaves no room for another round")
            base = None
            if duel is not None:
                best = duel.challenger[-1]
        return self._found(first, best, "nothing is left to try that could be faster")

    def _found(self, first: RunResult, best_run: RunResult, stopped: str) -> Found:
        before = rates(self._duels[0].champion) if self._duels else [first.throughput.images_per_s]
        best = rates(self._duels[-1].challenger) if self._duels else before
        gains = [duel.ratio for duel in self._duels if duel.ratio is not None]
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
        """Return how many moves could not be told from none as others had the cores, as the end of a sentence."""
        starved = sum(entry.status == "starved" for entry in self._entries)
        what = (
            f"{starved} of {count(len(self._entries), 'trial')} could not be judged, as other processes held the cores"
        )
        return f"; {what} ({_AGAIN})" if starved else ""

    def _room(self, num_bases: int) -> int:
        """Return how many short runs there is room for beside `num_bases` of the best, when pairs are to follow."""
        if self.budget is None:
            return WIDTH
        return min(WIDTH, self.budget - self.bench.num_runs - num_bases - 2 * self.repeats)

    def _run_recipe(self) -> RunResult:
        found = self._run_best("recipe", self.steps)
        self.say(f"{THE_RECIPE}: {found.throughput.images_per_s:,.0f} images/s")
        return found

    def _run_best(self, name: str, steps: int) -> RunResult:
        """Return a run of the best, which others are compared with."""
        outcome = self.bench.make(name, self._best, steps, 1)
        if outcome.result is None:
            raise TrialError(outcome.error, outcome.code)
        return outcome.result

    def _moves(self, best: RunResult) -> list[Move]:
        """Return what is worth a run over the best: not what was slower, nor what was tried over this very one."""
        recipe = self.vary(self._best)
        assert recipe is not None, "the best fits its recipe"
        fitting = [move for move in self.space.moves(recipe, best) if self._over(move.patch) is not None]
        moves = [move for move in fitting if not self._is_way_back(move)]
        for move in moves:
            self._seen.setdefault(move.name, move)
        slower = {name for name, ratio in self._ratios.items() if ratio < SLOWER}
        left = [move for move in moves if move.name not in self._over_best | slower]
        return sorted(left, key=lambda move: -self._ratios.get(move.name, math.inf))  # what is new comes first

    def _is_way_back(self, move: Move) -> bool:
        """Return whether all that a move sets was left for something faster."""
        return all((path, str(value)) in self._left for path, value in move.patch.assignments)

    def _over(self, patch: Patch) -> Patch | None:
        """Return `patch` over the best, or None where they do not fit."""
        laid = self._laid(self._best, patch)
        return None if laid is None or self.vary(laid) is None else laid

    def _laid(self, below: Patch, added: Patch) -> Patch | None:
        try:
            return lay(self.bench.recipe, below, added)
        except RecipeError:
            return None

    def _at_once(self, move: Move) -> Duel | None:
        """Try one move in pairs alone, where there is no room for a short run before them."""
        self._rounds += 1
        self._over_best.add(move.name)
        entry = self._entry(move)
        duel = self._fight(entry)
        is_had = duel.status in ("won", "lost", "no_gain")  # what cannot be had will not be over other settings either
        self._ratios[move.name] = entry.value if is_had else 0.0
        return self._take(entry, duel, [entry]) if duel.status == "won" else None

    def _round(self, moves: Sequence[Move], base: RunResult | None) -> Duel | None:
        """Try moves over the best, which ran as `base` just now; return the pairs of runs that one has won, or None."""
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
        """Run each once, and the best before them, where there is no run of it."""
        length = "" if steps == self.steps else "-longer"
        if base is None:
            base = self._run_best(f"round-{self._rounds}-best{length}", steps)
        for entry in entries:
            patch = self._over(entry.move.patch)
            assert patch is not None, f"{entry.move.name} was left out where it does not fit"
            name = f"round-{self._rounds}-{entry.move.name}{length}"
            entry.take_short(self.bench.make(name, patch, steps, 1), base, steps)
            self.say(f"{entry.move.name}: {entry.why}")

    def _together(self, pool: Sequence[Entry]) -> Duel | None:
        """Try all that look faster at once, the fastest of those that exclude each other: it saves rounds.

        What may train otherwise is left to a round of its own: beside it, nobody could tell whether the others do.
        """
        parts: list[Entry] = []
        patch = Patch()
        for entry in (each for each in pool if each.move.parity == "same"):
            laid = self._laid(patch, entry.move.patch)
            is_free = not any(entry.move.keys & part.move.keys for part in parts)
            if entry.value >= GAIN and is_free and laid is not None and self._over(laid) is not None:
                parts.append(entry)
                patch = laid
        if len(parts) < 2 or not self._has_room_for_pairs():
            return None
        entry = self._entry(_joined([part.move for part in parts], patch))
        duel = self._fight(entry)
        if duel.status == "won" and entry.value < SLOWER * parts[0].value:
            entry.status, entry.why = "lost", f"{entry.why}, less than {parts[0].move.name} alone"
        if entry.status != "won":
            return None
        for part in parts:
            part.status, part.why = "won", f"{part.why}; as a part of {entry.move.name}"
        return self._take(entry, duel, pool)

    def _alone(self, pool: list[Entry]) -> Duel | None:
        """Halve, and let the rest fight for it one by one, until one has won or the fastest is no faster."""
        num_half = -(-len(pool) // 2)
        half, rest = pool[:num_half], pool[num_half:]
        if len(half) > 1 and self._room(1) >= len(half):
            self._compare(half, 2 * self.steps, None)
        for entry in (*sorted(half, key=lambda each: -each.value), *rest):
            if not entry.may_win or not self._has_room_for_pairs():
                break
            duel = self._fight(entry)
            if duel.status == "won":
                return self._take(entry, duel, pool)
            if duel.status in ("lost", "no_gain", "starved"):
                break
            self._ratios[entry.move.name] = 0.0  # what cannot be had will not be over other settings either
        return None

    def _has_room_for_pairs(self) -> bool:
        return self.budget is None or self.bench.num_runs + 2 * self.repeats <= self.budget

    def _fight(self, entry: Entry) -> Duel:
        patch = self._over(entry.move.patch)
        assert patch is not None, f"{entry.move.name} was left out where it does not fit"
        before, steps = self.bench.num_runs, 2 * self.steps
        self._fights += 1
        names = (f"pairs-{self._fights}-best", f"pairs-{self._fights}-{entry.move.name}")
        is_same = entry.move.parity == "same"
        duel = fight(self.bench, names, (self._best, patch), steps=steps, repeats=self.repeats, is_same=is_same)
        entry.take_duel(duel, steps, self.bench.num_runs - before)
        self.say(f"{entry.move.name}, over {entry.over}: {entry.status.replace('_', ' ')}: {entry.why}")
        return duel

    def _take(self, entry: Entry, duel: Duel, pool: Sequence[Entry]) -> Duel:
        """Lay what has won over the best. What it excludes is hoped for less by as much as it was slower."""
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
        self._duels.append(duel)
        self._over_best.clear()
        return duel


def _joined(moves: Sequence[Move], patch: Patch) -> Move:
    return Move(" + ".join(move.name for move in moves), "all that looked faster, at once", patch, ())
