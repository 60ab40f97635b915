"""Run one of two runs again with one of their differences put back at a time, and measure how much of a gap each makes.

Differences of a recipe are put back as overrides in short measured runs, and those of a watched script as arguments
and environment variables of its command.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from paceline.core.errors import PacelineError
from paceline.core.secrets import MASK
from paceline.core.statistics import ratio_interval
from paceline.core.watch_result import WatchResult
from paceline.core.why_result import RerunResult, RerunRow
from paceline.lab.patches import build_measurement_patch, expand_equivalent_paths
from paceline.lab.repeat import alternate_order
from paceline.lab.runner import RUN_TIMEOUT_S, TrialRunner
from paceline.lab.script_settings import find_arguments
from paceline.lab.trial import Trial, apply_patch, write_recipe
from paceline.recipe.load import Patch, iter_settings
from paceline.recipe.schema import Recipe
from paceline.watch.measured_run import run_measured
from paceline.watch.setup import group_arguments, is_recorded, is_whole

MAX_CHANGES: Final = 5
"""Differences that are put back one by one; the likeliest causes."""
_ENV: Final = "env."
_ARGUMENT: Final = "argv."
Change = tuple[str, ...]
"""Names of differences that are put back together."""


class NotMeasuredError(PacelineError):
    """A run did not take the steps that were to be measured."""


def measure_changes(
    measure: Callable[[Sequence[Change]], float],
    changes: Sequence[Change],
    left: Sequence[str],
    *,
    ratio: float,
    steps: int,
    repeats: int,
    report: Callable[[str], None],
) -> RerunResult:
    """Measure the first run alone, with each of `changes` and with all of them, `repeats` times in turn.

    `measure` returns seconds per unit with the given changes. `ratio` is the gap to explain. Raise `NotMeasuredError`
    if the first run fails, of which all others are variations.
    """
    variants: list[tuple[Change, ...]] = [(), *((each,) for each in changes)]
    if len(changes) > 1:
        variants.append(tuple(changes))
    times: dict[tuple[Change, ...], list[float]] = {each: [] for each in variants}
    errors: dict[tuple[Change, ...], str] = {}
    for turn in range(1, repeats + 1):
        # In turn, and every other time backwards, so that a drift of the machine favors none.
        for variant in alternate_order(variants, turn):
            if variant in errors:
                continue
            report(f"{turn} of {repeats}: {', '.join(name for each in variant for name in each) or 'the first run'}")
            try:
                times[variant].append(measure(variant))
            except NotMeasuredError as error:
                if not variant:
                    raise
                errors[variant] = str(error)

    def build_row(variant: tuple[Change, ...]) -> RerunRow:
        names = tuple(name for each in variant for name in each)
        if variant in errors:
            return RerunRow(differences=names, error=errors[variant])
        found = ratio_interval(times[variant], times[()])
        return RerunRow(differences=names, ratio=found, share=math.log(found.value) / math.log(ratio))

    return RerunResult(
        pairs=repeats,
        steps=steps,
        whole=build_row(variants[-1]),
        rows=tuple(build_row((each,)) for each in changes),
        left=tuple(left),
    )


@dataclass(frozen=True)
class ScriptRuns:
    """Runs of the command of a watched script, with arguments and variables of another one put back.

    They write to `folder`. `environ` are the variables of this process. Times are per sample if `per_sample`, else per
    step.
    """

    first: WatchResult
    second: WatchResult
    environ: Mapping[str, str]
    folder: Path
    steps: int
    warmup: int
    per_sample: bool
    _number: "count[int]" = field(default_factory=partial(count, 1), init=False, repr=False)

    def measure(self, changes: Sequence[Change]) -> float:
        """Run the first command with `changes`, and return its seconds per unit. Raise `NotMeasuredError`."""
        names = [name for each in changes for name in each]
        arguments = [_word(each) for each in names if each.startswith(_ARGUMENT)]
        command = replace_arguments(self.first.command, self.second.command, arguments)
        environ = replace_variables(
            self.environ, self.first, self.second, [each.removeprefix(_ENV) for each in names if each.startswith(_ENV)]
        )
        folder = self.folder / str(next(self._number))
        run = run_measured(command, environ, folder, warmup=self.warmup, steps=self.steps, timeout_s=RUN_TIMEOUT_S)
        if run.failure:
            raise NotMeasuredError(f"the command {run.failure.splitlines()[0]}")
        samples = (run.result.samples_per_s or 0.0) * run.result.step_s
        if self.per_sample and not samples:
            raise NotMeasuredError("the number of samples of its batches is unknown")
        return run.span_s / (samples if self.per_sample else 1.0)


def find_script_changes(first: WatchResult, second: WatchResult, names: Sequence[str]) -> list[Change]:
    """Return those of the differences `names` of two watched commands that can be put back."""
    ours, theirs = (_group_script_arguments(each.command)[1] for each in (first, second))
    return [
        (name,)
        for name in names
        if (name.startswith(_ENV) and _can_put_back(name, first) and _can_put_back(name, second))
        # Not those that have a position alone: one may be the folder in which the second run has its files.
        or (
            name.startswith(f"{_ARGUMENT}-")
            and ours.get(_word(name)) != theirs.get(_word(name))
            and not _is_masked(theirs.get(_word(name), ()))
        )
    ]


def _can_put_back(name: str, result: WatchResult) -> bool:
    return is_recorded(name.removeprefix(_ENV)) and is_whole(result.setup.get(name, ""))


def find_masked_argument(command: Sequence[str]) -> str | None:
    """Return the name or position of an argument of a watched command whose value was not recorded, else None."""
    return next((name for name, given in group_arguments(command).items() if _is_masked(given)), None)


def _is_masked(argument: Sequence[str]) -> bool:
    return any(MASK in each for each in argument)


def _word(name: str) -> str:
    return name.removeprefix(_ARGUMENT)


def replace_variables(
    environ: Mapping[str, str], first: WatchResult, second: WatchResult, names: Sequence[str]
) -> dict[str, str]:
    """Return `environ` with the recorded variables as `first` had them, and `names` as `second` had them.

    Variables that are not recorded keep their value, as do those that are too long to be recorded whole.
    """
    ours, theirs = _variables(first), _variables(second)
    found = {name: value for name, value in environ.items() if not is_recorded(name) or f"{_ENV}{name}" in first.setup}
    found |= ours
    for name in names:
        found.pop(name, None)
        if name in theirs:
            found[name] = theirs[name]
    return found


def _variables(result: WatchResult) -> dict[str, str]:
    return {
        name.removeprefix(_ENV): value
        for name, value in result.setup.items()
        if name.startswith(_ENV) and _can_put_back(name, result)
    }


def replace_arguments(command: Sequence[str], other: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return `command` with the arguments `names` of its script as `other` has them, or without those that it lacks."""
    if not names:
        return list(command)
    launch, ours = _group_script_arguments(command)
    _, theirs = _group_script_arguments(other)
    for name in names:
        if name in theirs:
            ours[name] = theirs[name]
        else:
            ours.pop(name, None)
    return [*launch, *(word for each in ours.values() for word in each)]


def _group_script_arguments(command: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the words up to the script, whose options are those of a launcher, and the arguments of the script."""
    start = find_arguments(command)
    return list(command[:start]), group_arguments(command[start:])


@dataclass(frozen=True)
class RecipeRuns:
    """Short measured runs of a recipe, with fields of another one put back; `runner` runs them in new processes."""

    second: Recipe
    runner: TrialRunner
    _number: "count[int]" = field(default_factory=partial(count, 1), init=False, repr=False)

    def measure(self, changes: Sequence[Change]) -> float:
        """Run the first recipe with `changes`, and return its seconds per image. Raise `NotMeasuredError`."""
        theirs = _settings(self.second)
        names = [name for each in changes for name in each if name in theirs]
        # Another variant has defaults of its own, so all of its fields are put back.
        variants = tuple(name.removesuffix("name") for name in names if name.endswith(".name"))
        names += [name for name in theirs if variants and name.startswith(variants) and name not in names]
        assignments = [(name, theirs[name]) for name in names]
        outcome = self.runner.run(Trial("why", Patch(tuple(assignments))), next(self._number))
        if outcome.result is None:
            raise NotMeasuredError(outcome.error)
        return 1 / outcome.result.throughput.images_per_s


def find_recipe_changes(first: Recipe, second: Recipe, names: Sequence[str]) -> list[Change]:
    """Return those of the differences `names` that can be put back in a short run; a variant's fields together."""
    changes: dict[str, list[str]] = {}
    settings = {**_settings(first), **_settings(second)}
    fixed = expand_equivalent_paths(path for path, _ in build_measurement_patch(first, 1, Patch()).assignments)
    variants = {name.rpartition(".")[0] for name in names if name.endswith(".name")}
    for name in names:
        if name in settings and name not in fixed:
            section = next((each for each in variants if name.startswith(f"{each}.")), name)
            changes.setdefault(section, []).append(name)
    return [tuple(each) for each in changes.values()]


def build_recipe_runs(first: Recipe, second: Recipe, folder: Path, *, ranks: int, steps: int) -> RecipeRuns:
    """Return the runs of a recipe, which write to `folder`. Raise `PacelineError` if it cannot be written."""
    measured = apply_patch(first, build_measurement_patch(first, steps, Patch()))
    file = folder / "recipe.yaml"
    write_recipe(measured, file)
    runner = TrialRunner(
        measured,
        file,
        ranks,
        get_folder=lambda trial, repeat: folder / f"run-{repeat}",
        timeout_s=RUN_TIMEOUT_S,
        oversubscribe=True,
    )
    return RecipeRuns(second, runner)


def _settings(recipe: Recipe) -> dict[str, object]:
    return dict(iter_settings(recipe.to_dict()))


def list_left(names: Sequence[str], changes: Sequence[Change]) -> Iterator[str]:
    """Yield the differences that are not in `changes`."""
    put_back = {name for each in changes for name in each}
    yield from (each for each in names if each not in put_back)
