"""Search spaces: candidates that could win, or values that the user has listed. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from paceline.core.errors import RecipeError
from paceline.core.learning import changes_result, changes_result_only
from paceline.core.results import RunResult
from paceline.lab.moves import MIN_CEILING, Candidate, Hardware, build_named_candidate, list_candidates
from paceline.lab.trial import apply_patch
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe
from paceline.recipe.yamlfile import read_yaml_value

_FIXED_PREFIXES = ("train.steps", "train.epochs", "train.eval", "measure.", "checkpoint.", "data.replay", "model.name")


class SearchSpace(Protocol):
    """Settings that a search may try on top of the best ones."""

    def list_candidates(self, best: Recipe, result: RunResult) -> Sequence[Candidate]:
        """Return the candidates on top of `best`, whose run gave `result`, the most promising first."""
        ...


@dataclass(frozen=True)
class BottleneckSpace:
    """Candidates ordered by the bottleneck of the best run, without those that cannot win."""

    allow_batch: bool = False

    def list_candidates(self, best: Recipe, result: RunResult) -> Sequence[Candidate]:
        """Return candidates that address the bottleneck, or shrink stages long enough to matter."""
        found = list_candidates(best, Hardware.from_result(result), result.verdict, allow_batch=self.allow_batch)
        return [move for move in found if _can_win(move, result)]


@dataclass(frozen=True)
class ExplicitSpace:
    """Values by dotted path, each its own candidate; their product is the grid."""

    values: Mapping[str, tuple[Any, ...]]

    def list_candidates(self, best: Recipe, result: RunResult) -> Sequence[Candidate]:
        """Return the values that `best` does not have."""
        found = (build_named_candidate(best, path, value) for path, values in self.values.items() for value in values)
        return [move for move in found if move is not None]


def build_search_space(arguments: Sequence[str], recipe: Recipe, *, allow_batch: bool) -> SearchSpace:
    """Return the space of `KEY=V1,V2,...` arguments, or the list of all candidates without arguments.

    Raise `RecipeError` for a path or value that the recipe rejects, and for fields that a search must not change.
    """
    if not arguments:
        return BottleneckSpace(allow_batch)
    values: dict[str, tuple[Any, ...]] = {}
    for argument in arguments:
        path, chosen = parse_values(argument)
        _check_values(path, chosen, recipe, allow_batch=allow_batch)
        values[path] = (*values.get(path, ()), *chosen)
    return ExplicitSpace(values)


def compute_grid_size(moves: Iterable[Candidate]) -> int:
    """Return the number of combinations, "unchanged" included."""
    groups: list[tuple[frozenset[str], int]] = []
    for move in moves:
        keys, num_moves, others = move.paths, 1, []
        for known, number in groups:
            if known & keys:
                keys, num_moves = keys | known, num_moves + number
            else:
                others.append((known, number))
        groups = [*others, (keys, num_moves)]
    return math.prod(1 + number for _, number in groups)


def _can_win(move: Candidate, result: RunResult) -> bool:
    if result.verdict.get("bottleneck") in move.cures or not move.expects:
        return True
    # A stage with a share s of the step allows a speedup of at most 1 / (1 - s) (Amdahl 1967).
    stage_share = sum(result.stages[name].share for name in move.expects if name in result.stages)
    return stage_share >= 1 - 1 / MIN_CEILING


def parse_values(word: str) -> tuple[str, tuple[Any, ...]]:
    """Return the dotted path and the values of a `KEY=V1,V2,...` argument. Raise `RecipeError` if it has none."""
    path, equals, text = word.partition("=")
    values = read_yaml_value(f"[{text}]", "--vary") if equals and text else None
    if not path or not values:
        raise RecipeError(f"--vary: {word!r} lists no values (write KEY=V1,V2, such as data.workers=1,2,4)")
    return path, tuple(values)


def _check_values(path: str, values: tuple[Any, ...], recipe: Recipe, *, allow_batch: bool) -> None:
    fields = list(dict.fromkeys(field for value in values for field in iter_fields(path, value)))
    for field in fields:
        if field.startswith(_FIXED_PREFIXES):
            raise RecipeError(f"--vary: {field} is not a setting to tune for speed (leave it out)")
        if field == "data.rank_batch_size":
            raise RecipeError(f"--vary: {field} is varied as data.batch_size, over all ranks (write that instead)")
        if field == "data.batch_size" and not allow_batch:
            raise RecipeError(f"--vary: {field} changes what is trained (add --allow-batch, and the rate follows)")
        if field.startswith(
            "schedule."
        ):  # check here: the measured recipe has another schedule, which may lack the field
            _refuse_learning_field(field)
    for value in values:
        changed = apply_patch(recipe, Patch(((path, value),)))
        is_other = changed.optim.name != recipe.optim.name  # which needs its own learning rate
        for field in filter(changes_result, iter_fields(path, value)):
            if not (is_other and field.startswith("optim.")):
                _refuse_learning_field(field)


def iter_fields(path: str, value: Any) -> Iterator[str]:
    """Yield the dotted paths of the fields that a value sets; a mapping sets several."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from iter_fields(f"{path}.{key}", each)
    else:
        yield path


def _refuse_learning_field(field: str) -> NoReturn:
    if changes_result_only(field):
        why = "changes what is learned and not the speed, so the fastest value would be noise"
    else:
        why = "changes what is learned, too, so the fastest value may be the least accurate"
    fix = "train one run per value, and compare their accuracy with paceline compare"
    raise RecipeError(f"--vary: {field} {why} ({fix})")
