"""Search settings that change what is learned, by successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943).

Rungs are whole trainings of 1/9, 1/3 and all of the recipe's length: each has its own schedule, down to its end. The
best third of a rung is trained anew, for longer, on the next one. The recipe itself is on every rung.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from pydantic import ValidationError

from paceline.core.errors import RecipeError
from paceline.core.experiments.results import LearnTrial
from paceline.core.json_file import ResultModel
from paceline.core.metric import monitor_of
from paceline.core.random import Stream, uniform
from paceline.core.results import RunResult
from paceline.core.units import TIME_UNITS, Duration, count
from paceline.lab.patches import (
    Assignment,
    disable_checkpoints,
    drop_unchanged_settings,
    get_setting,
    merge_patches,
    reset_to_defaults,
)
from paceline.lab.trial import Trial, TrialOutcome, apply_patch, format_patch
from paceline.recipe.load import Patch
from paceline.recipe.schema import Recipe
from paceline.recipe.schema.base import Section
from paceline.recipe.schema.optim import Plateau
from paceline.recipe.schema.train import OwnLoss
from paceline.recipe.yaml import read_yaml_file

ETA: Final = 3
"""One in `ETA` candidates is promoted to the next rung (Li et al. 2018, arXiv 1603.06560, recommend 3 or 4)."""
SHARES: Final = (1 / 9, 1 / 3, 1.0)
"""Length of the runs of each rung, as a share of the recipe's."""
BASE: Final = "the recipe"
MIN_CANDIDATES: Final = 3
_AUGMENT: Final = "data.augment."
_STRENGTHS: Final[dict[str, tuple[str, float, float]]] = {
    "rand_augment": ("magnitude", 3, 15),
    "rand_augment_timm": ("magnitude", 3, 10),
    "augmix": ("severity", 1, 6),
    "random_erasing": ("p", 0.05, 0.5),
    "mixup": ("alpha", 0.05, 0.8),
    "cutmix": ("p", 0.1, 1.0),
    "color_jitter": ("p", 0.2, 1.0),
}
"""Field that sets the strength of an augmentation, and the range to search."""


class Dimension(ResultModel):
    """A field to search: from `low` to `high` on a `scale`, or one of `values`."""

    low: float | None = None
    high: float | None = None
    scale: Literal["linear", "log"] = "linear"
    values: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.values:
            return ", ".join(map(str, self.values))
        return f"{self.low:g} to {self.high:g}, {self.scale}"

    def pick(self, share: float) -> Any:
        """Return the value at `share` in [0, 1) of the range, with three significant digits."""
        if self.values:
            return self.values[int(share * len(self.values))]
        assert self.low is not None and self.high is not None, "a dimension has values or a range"
        if self.scale == "log":
            return float(f"{self.low * (self.high / self.low) ** share:.3g}")
        return float(f"{self.low + (self.high - self.low) * share:.3g}")

    def find_problem(self) -> str:
        """Return what is wrong with the dimension, and the fix, or ""."""
        if self.values:
            return "" if self.low is None and self.high is None else "has a range and values (leave one of them out)"
        if self.low is None or self.high is None:
            return "has no range (give low and high, or values)"
        if not self.low < self.high:
            return f"low {self.low:g} is not below high {self.high:g} (swap them)"
        return "low must be above 0 on a log scale (set scale: linear)" if self.scale == "log" and self.low <= 0 else ""


LearnSpace = Mapping[str, Dimension]
"""Dimensions by dotted path; `data.augment.mixup.alpha` is a field of an entry of that list."""


def default_space(recipe: Recipe) -> LearnSpace:
    """Return the space of a recipe: learning rate, weight decay, label smoothing and the strength of augmentations."""
    optim = recipe.optim
    space = {"optim.lr": Dimension(low=optim.lr / 10, high=optim.lr * 10, scale="log")}
    if optim.weight_decay > 0:
        low, high = optim.weight_decay / 10, optim.weight_decay * 10
        space["optim.weight_decay"] = Dimension(low=low, high=high, scale="log")
    if not isinstance(recipe.train.loss, OwnLoss):
        space["train.label_smoothing"] = Dimension(low=0.0, high=0.2)
    for section in recipe.data.augment:
        if section.name in _STRENGTHS:
            name, low, high = _STRENGTHS[section.name]
            space[f"{_AUGMENT}{section.name}.{name}"] = Dimension(low=low, high=high)
    return space


def read_space(path: Path, recipe: Recipe) -> LearnSpace:
    """Read a space from a YAML file. Raise `RecipeError` if it is invalid or does not fit `recipe`."""
    space = {}
    for name, value in _flatten(read_yaml_file(path).values):
        try:
            dimension = Dimension.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise RecipeError(
                f"{path}: {name}: {where}: {first['msg']} (give low, high and scale, or values)"
            ) from None
        if problem := dimension.find_problem():
            raise RecipeError(f"{path}: {name}: {problem}")
        space[name] = dimension
        for share in (0.0, 0.999):
            apply_patch(recipe, build_candidate_patch(recipe, {name: dimension.pick(share)}))
    if not space:
        raise RecipeError(f"{path}: names no field (write optim.lr: {{low: 0.01, high: 1, scale: log}})")
    return space


def _flatten(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        is_section = isinstance(value, dict) and not {"low", "high", "values", "scale"} & set(value)
        if is_section and value:
            yield from _flatten(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def draw_candidates(recipe: Recipe, space: LearnSpace, number: int) -> list[Patch]:
    """Return the first `number` candidates: a Halton sequence, shifted by draws of the recipe's seed.

    A random shift modulo 1 keeps the low discrepancy (Cranley and Patterson 1976, doi 10.1137/0713071).
    """
    from scipy.stats import qmc  # type: ignore[import-untyped]  # importing it takes a second

    shift = uniform(recipe.seed, Stream.SEARCH, 0, np.zeros(1, dtype=np.int64), len(space))
    points = (qmc.Halton(len(space), scramble=False).random(number) + shift) % 1.0
    return [
        build_candidate_patch(
            recipe, {name: dimension.pick(share) for (name, dimension), share in zip(space.items(), point, strict=True)}
        )
        for point in points.tolist()
    ]


def build_candidate_patch(recipe: Recipe, values: Mapping[str, Any]) -> Patch:
    """Return the patch that sets `values` by dotted path. Raise `RecipeError` for an augmentation that is not there."""
    settings: list[Assignment] = []
    augment = recipe.to_dict()["data"]["augment"]
    for path, value in values.items():
        if not path.startswith(_AUGMENT):
            settings.append((path, _like(get_setting(recipe, path), value)))
            continue
        name, _, leaf = path.removeprefix(_AUGMENT).partition(".")
        entry = next((each for each in augment if each["name"] == name), None)
        if entry is None or leaf not in entry:
            raise RecipeError(f"{path}: the recipe's data.augment has no such entry or field (add it, or leave it out)")
        entry[leaf] = _like(entry[leaf], value)
    if any(path.startswith(_AUGMENT) for path in values):
        settings.append(("data.augment", augment))
    return Patch(tuple(settings))


def _like(known: object, value: Any) -> Any:
    is_count = isinstance(known, int) and not isinstance(known, bool)
    return round(value) if is_count and isinstance(value, float) else value


def build_rung_patch(recipe: Recipe, candidate: Patch, share: float) -> Patch:
    """Return the patch of a whole training of `share` of the recipe's length, with the candidate's settings.

    Lengths of the schedule shrink with it. The run is evaluated at its end, writes no checkpoints, and does not stop
    early.
    """
    varied = apply_patch(recipe, candidate)
    train, schedule = varied.train, varied.schedule
    settings: list[Assignment] = [*reset_to_defaults(train, "train", ("stop", "patience", "max_time"))]
    if share < 1:
        if train.steps != "auto":
            settings.append(("train.steps", max(1, round(train.steps * share))))
        elif train.epochs != "auto":
            settings.append(("train.epochs", float(f"{train.epochs * share:.6g}")))
        if getattr(schedule, "warmup_by", "step") == "epoch":  # needs whole epochs
            settings.append(("schedule.warmup_by", "step"))
        sections = (("schedule", schedule), ("data.progressive", varied.data.progressive), ("model", varied.model))
        for path, section in sections:
            if isinstance(section, Section):
                settings += [(f"{path}.{name}", value) for name, value in _short_lengths(section, share).items()]
        lengths = [_short_lengths(section, share) for section in varied.data.augment]
        if any(lengths):
            augment = zip(varied.to_dict()["data"]["augment"], lengths, strict=True)
            settings.append(("data.augment", [entry | shorter for entry, shorter in augment]))
    if not isinstance(schedule, Plateau):  # which observes evaluations
        settings.append(("train.eval_every", "100%"))
    elif share < 1 and train.eval_every != "off":
        settings.append(("train.eval_every", _shorten(train.eval_every, share)))
    settings += [*disable_checkpoints(varied.checkpoint, Patch()), ("log.report", "off")]
    return merge_patches(recipe, candidate, drop_unchanged_settings(varied, settings))


def _short_lengths(section: Section, share: float) -> dict[str, Any]:
    """Return the fields of `section` that are lengths, shortened."""
    values = {name: getattr(section, name) for name in type(section).model_fields}
    return {name: _shorten(value, share) for name, value in values.items() if _is_length(value)}


def _is_length(value: object) -> bool:
    return isinstance(value, Duration) or (isinstance(value, tuple) and all(map(_is_length, value)) and bool(value))


def _shorten(value: Any, share: float) -> Any:
    if isinstance(value, tuple):
        return [_shorten(each, share) for each in value]
    return str(value if value.unit == "%" else Duration(float(f"{value.value * share:.6g}"), value.unit))


@dataclass(frozen=True)
class Budget:
    """A budget of `runs`, counted in whole trainings of the recipe, or of `seconds` of training; the other is None."""

    runs: float | None
    seconds: float | None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Parse `20` or `2h`. Raise `RecipeError` for anything else."""
        with contextlib.suppress(ValueError):
            if 0 < float(text) < math.inf:
                return cls(float(text), None)
        try:
            duration = Duration.parse(text, TIME_UNITS)
        except ValueError:
            duration = None
        if duration is None or not duration.is_time or not duration.value:
            raise RecipeError(f"--budget: {text!r} is neither a number of training runs nor a time (write 20 or 2h)")
        return cls(None, duration.seconds)


def rung_sizes(num_candidates: int) -> tuple[int, ...]:
    """Return the number of candidates on each rung; the recipe comes on top."""
    return tuple(-(-num_candidates // ETA**number) for number in range(len(SHARES)))


def compute_cost(num_candidates: int, seeds: int) -> float:
    """Return the cost of a search in full training runs: its rungs, and the best and the recipe with `seeds` each."""
    rungs = zip(rung_sizes(num_candidates), SHARES, strict=True)
    return math.fsum((size + 1) * share for size, share in rungs) + 2 * seeds


def count_candidates(budget: float, seeds: int) -> int:
    """Return the largest number of candidates that `budget` whole trainings pay for; 0 if that is too few."""
    number = 0
    # 1e-9: nine runs of a ninth are one training.
    while compute_cost(number + 1, seeds) <= budget + 1e-9:
        number += 1
    return number if number >= MIN_CANDIDATES else 0


@dataclass
class LearnSearch:
    """Run rungs and finals within a budget. Use once.

    `run` runs a trial once. A finished run of an earlier start counts with the time it took.
    """

    recipe: Recipe
    space: LearnSpace
    seeds: int
    budget: Budget
    run: Callable[[Trial, int], TrialOutcome]
    raise_failed: Callable[[TrialOutcome], Any]
    report: Callable[[str], None]
    trials: list[LearnTrial] = field(default_factory=list)
    outcomes: list[TrialOutcome] = field(default_factory=list)
    spent_s: float = 0.0
    spent: float = 0.0
    _training_s: float = 0.0

    def search(self) -> tuple[str, Patch, list[float], list[float]]:
        """Return the best candidate, its patch, and its values and the recipe's, one per seed."""
        first = self._run(BASE, Patch(), 0)
        if self.outcomes[0].result is None:
            self.raise_failed(self.outcomes[0])
        if first.value is None:
            raise RecipeError(f"train.monitor: {first.metric} of the recipe is NaN, so nothing compares (set another)")
        number = count_candidates(self._count_trainings(), self.seeds)
        if not number:
            least = compute_cost(MIN_CANDIDATES, self.seeds)
            time_text = f", about {least * self._training_s:.0f} s" if self.budget.seconds else ""
            needs = f"{least:.1f} full training runs{time_text}, that {MIN_CANDIDATES} candidates take"
            raise RecipeError(f"--budget: less than the {needs} (raise it, or lower --seeds)")
        candidates = {
            f"candidate {index}": patch
            for index, patch in enumerate(draw_candidates(self.recipe, self.space, number), start=1)
        }
        sizes = " + ".join(map(str, rung_sizes(number)))
        self.report(f"{count(number, 'candidate')}, on rungs of {sizes}; the recipe runs on each")
        names = list(candidates)
        for rung in range(len(SHARES)):
            if rung:
                self._run(BASE, Patch(), rung)
            names = self._run_rung(names, candidates, rung)
        best = names[0]
        return best, candidates[best], *self._run_finals(best, candidates[best])

    def _count_trainings(self) -> float:
        if self.budget.runs is not None:
            return self.budget.runs
        assert self.budget.seconds is not None and self._training_s > 0, "the first run has been timed"
        return self.budget.seconds / self._training_s

    def _has_time(self, trainings: float) -> bool:
        return self.budget.seconds is None or self.spent_s + trainings * self._training_s <= self.budget.seconds

    def _run_rung(self, names: Sequence[str], candidates: Mapping[str, Patch], rung: int) -> list[str]:
        """Train candidates, and return the names of those to promote, the best first."""
        tried: list[LearnTrial] = []
        reserved = 2 * sum(SHARES[rung + 1 :]) + 2 * self.seeds  # a candidate and the recipe, on all that follows
        for name in names:
            # Later runs may turn out slower than the first, by which the number of candidates was chosen.
            if tried and not self._has_time(SHARES[rung] + reserved):
                self.report(f"{name} and later ones are left out: the budget is spent")
                break
            tried.append(self._run(name, candidates[name], rung))
        num_kept = -(-len(tried) // ETA) if rung + 1 < len(SHARES) else 1
        return [trial.name for trial in sorted(tried, key=_badness)[:num_kept]]

    def _run_finals(self, best: str, patch: Patch) -> tuple[list[float], list[float]]:
        # Other seeds than the rungs', on which the best of many candidates was also the luckiest.
        values: dict[str, list[float]] = {best: [], BASE: []}
        for turn in range(1, self.seeds + 1):
            if turn > 1 and not self._has_time(2):
                self.report(f"seeds from {turn} on are left out: the budget is spent")
                break
            for name, settings in ((best, patch), (BASE, Patch())):
                trial = self._run(name, settings, len(SHARES), turn)
                values[name] += [] if trial.value is None else [trial.value]
        return values[best], values[BASE]

    def _run(self, name: str, candidate: Patch, rung: int, turn: int = 0) -> LearnTrial:
        """Run a trial on a rung, or with the seed of a turn of the finals."""
        share = SHARES[min(rung, len(SHARES) - 1)]
        patch = build_rung_patch(self.recipe, candidate, share)
        if turn:
            patch = Patch((*patch.assignments, ("seed", self.recipe.seed + turn)))
        label = f"{name}, final" if turn else f"{name}, rung {rung + 1}"
        outcome = self.run(Trial(label, patch), max(1, turn))
        # A run that failed counts as a whole one, so that a resumed search decides alike.
        wall_s, value, is_minimized, metric = share * self._training_s, None, False, ""
        if outcome.result is not None:
            wall_s = outcome.result.time.wall_s
            value, metric, is_minimized = read_value(outcome.result)
            self._training_s = wall_s / share  # the latest, and so the longest, is the best estimate
        self.spent_s += wall_s
        self.spent += share
        trial = LearnTrial(
            name=name,
            patch=tuple(format_patch(candidate)),
            rung=rung + 1,
            share=share,
            seed=self.recipe.seed + turn,
            metric=metric,
            is_minimized=is_minimized,
            value=value,
            error=outcome.error,
            run=outcome.folder if outcome.result is not None else "",
            wall_s=wall_s,
        )
        self.trials.append(trial)
        self.outcomes.append(outcome)
        score = f"{metric} {'NaN' if value is None else f'{value:.4f}'}"
        self.report(f"{label}: {outcome.error or score}")
        return trial


def read_value(result: RunResult) -> tuple[float | None, str, bool]:
    """Return the last value of the metric that a run monitored (None: NaN), its name, and whether it is minimized."""
    monitor, last = monitor_of(result), result.ema or result.eval
    value = math.nan if last is None else monitor.value(last)
    return None if math.isnan(value) else value, monitor.name, monitor.is_minimized


def _badness(trial: LearnTrial) -> float:
    if trial.value is None:
        return math.inf
    return trial.value if trial.is_minimized else -trial.value
