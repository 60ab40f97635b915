"""What a search may change: the moves of the list that could win something, or values that a person has named. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from paceline.core.errors import RecipeError
from paceline.core.learning import learns, only_learning
from paceline.core.results import RunResult
from paceline.lab.moves import WORTH, Move, Place, moves_for, named
from paceline.lab.trial import vary
from paceline.recipe.patch import Patch
from paceline.recipe.schema import Recipe
from paceline.recipe.yamlfile import read_value

_FIXED = ("train.steps", "train.epochs", "train.eval", "measure.", "checkpoint.", "data.replay", "model.name")


class Space(Protocol):
    """The settings that a search may try over the best that it knows."""

    def moves(self, best: Recipe, result: RunResult) -> Sequence[Move]:
        """Return what may be tried over the recipe `best`, whose run came to `result`, the most promising first."""
        ...


@dataclass(frozen=True)
class FromVerdict:
    """The list of moves, in the order that the verdict of the best run says, without those that can win nothing."""

    allow_batch: bool = False

    def moves(self, best: Recipe, result: RunResult) -> Sequence[Move]:
        """Return moves that cure the bottleneck, or shrink stages that take enough of a step to be worth a run.

        A stage that takes a share s of a step cannot make it faster than 1 / (1 - s) times (Amdahl 1967).
        """
        found = moves_for(best, Place.of(result), result.verdict, allow_batch=self.allow_batch)
        return [move for move in found if _can_win(move, result)]


@dataclass(frozen=True)
class ByHand:
    """Values by dotted path, each of which is a move of its own; their product is the grid."""

    values: Mapping[str, tuple[Any, ...]]

    def moves(self, best: Recipe, result: RunResult) -> Sequence[Move]:
        """Return the values that `best` does not have."""
        found = (named(best, path, value) for path, values in self.values.items() for value in values)
        return [move for move in found if move is not None]


def build_space(words: Sequence[str], recipe: Recipe, *, allow_batch: bool) -> Space:
    """Return the space of `KEY=V1,V2,...` words, or that of the list of moves without any.

    Raise `RecipeError` for a path or a value that the recipe does not take, and for what a search must not change.
    """
    if not words:
        return FromVerdict(allow_batch)
    values: dict[str, tuple[Any, ...]] = {}
    for word in words:
        path, chosen = read_values(word)
        _check(path, chosen, recipe, allow_batch=allow_batch)
        values[path] = (*values.get(path, ()), *chosen)
    return ByHand(values)


def grid_of(moves: Iterable[Move]) -> int:
    """Return how many settings there are: the product over what excludes each other, "as it is" counted with each."""
    groups: list[tuple[frozenset[str], int]] = []
    for move in moves:
        keys, num_moves, others = move.keys, 1, []
        for known, number in groups:
            if known & keys:
                keys, num_moves = keys | known, num_moves + number
            else:
                others.append((known, number))
        groups = [*others, (keys, num_moves)]
    return math.prod(1 + number for _, number in groups)


def _can_win(move: Move, result: RunResult) -> bool:
    if result.verdict.get("bottleneck") in move.cures or not move.expects:
        return True
    share = sum(result.stages[name].share for name in move.expects if name in result.stages)
    return share >= 1 - 1 / WORTH


def read_values(word: str) -> tuple[str, tuple[Any, ...]]:
    """Return the dotted path and the values of a `KEY=V1,V2,...` word. Raise `RecipeError` where it has none."""
    path, equals, text = word.partition("=")
    found = read_value(f"[{text}]", "--vary") if equals and text else None
    if not path or not found:
        raise RecipeError(f"--vary: {word!r} names no values (write KEY=V1,V2, such as data.workers=1,2,4)")
    return path, tuple(found)


def _check(path: str, values: tuple[Any, ...], recipe: Recipe, *, allow_batch: bool) -> None:
    fields = list(dict.fromkeys(field for value in values for field in fields_of(path, value)))
    for field in fields:
        if field.startswith(_FIXED):
            raise RecipeError(f"--vary: {field} is no setting to tune for speed (leave it out)")
        if field == "data.rank_batch_size":
            raise RecipeError(f"--vary: {field} is varied as data.batch_size, over all ranks (write that instead)")
        if field == "data.batch_size" and not allow_batch:
            raise RecipeError(f"--vary: {field} changes what is trained (add --allow-batch, and the rate follows)")
        if field.startswith("schedule."):  # here, as what is measured has another one, which may lack the field
            _refuse_learning(field)
    for value in values:
        changed = vary(recipe, Patch(((path, value),)))
        is_other = changed.optim.name != recipe.optim.name  # which needs a rate and such of its own
        for field in filter(learns, fields_of(path, value)):
            if not (is_other and field.startswith("optim.")):
                _refuse_learning(field)


def fields_of(path: str, value: Any) -> Iterator[str]:
    """Yield the dotted paths of the fields that a value sets: a section is given as a mapping."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from fields_of(f"{path}.{key}", each)
    else:
        yield path


def _refuse_learning(field: str) -> NoReturn:
    if only_learning(field):
        why = "changes what is learnt and not how fast, so that the fastest value is noise"
    else:
        why = "changes what is learnt too, so that the fastest value may be the one that learns least"
    fix = "train a run for each value, and see which is more accurate with paceline compare"
    raise RecipeError(f"--vary: {field} {why} ({fix})")
