"""An experiment as the jobs of an array: what its command is, word for word, and which tasks it has.

A scheduler is told nothing here. What a machine is asked for otherwise, such as how many GPUs it has, is said in the
words, so that they mean the same where the jobs run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.cli.scale_verb import measuring_options
from paceline.cli.scale_words import Options, read_ranks
from paceline.cli.submit_options import read_options
from paceline.core.errors import RecipeError
from paceline.lab.tasks import Task

_AUTO: Final = "auto"
_OURS: Final = ("run_dir", "task", "list_only")
"""Options that whoever starts a task gives, or that start none."""


@dataclass(frozen=True)
class Array:
    """The `words` after `paceline` that run a whole experiment, and its tasks.

    With `--run-dir DIR --task K` they run task K, and with `--run-dir DIR` alone what is missing, and judge.
    """

    words: tuple[str, ...]
    tasks: tuple[Task, ...]


def build_array(verb: str, words: Sequence[str], options: Sequence[str], ranks_per_node: int) -> Array:
    """Return the array of an experiment: `ladder` or `scale`, its recipe and overrides, and its own options.

    `ranks_per_node` are those that it has where `--ranks` does not say. Raise `PacelineError` for what it does not
    have, and a usage error of typer's for options that do not fit.
    """
    match verb:
        case "ladder":
            return _ladder([*words, *options], ranks_per_node)
        case "scale":
            return _scale([*words, *options], ranks_per_node)
    raise RecipeError(f"--array: {verb} has no parts that run at once (it is for ladder and scale)")


def _ladder(words: list[str], ranks_per_node: int) -> Array:
    from paceline.cli.ladder import tasks_of

    given = _given("ladder", words)
    ranks, said = given["ranks"], words
    if ranks == _AUTO:
        ranks, said = str(ranks_per_node), [*words, "--ranks", str(ranks_per_node)]
    asked = {name: given[name] for name in ("recipe", "steps", "repeats")}
    return Array(("ladder", *said), tasks_of(list(given["words"] or []), ranks, **asked))


def _scale(words: list[str], ranks_per_node: int) -> Array:
    from paceline.cli.scale import tasks_of

    given = _given("scale", words)
    asked = {name: value for name, value in measuring_options(given).items() if name not in (*_OURS, "own_code")}
    options, said = Options(**asked), words
    if options.ranks == _AUTO:
        known = [ranks_per_node] if options.is_study else read_ranks(_AUTO, ranks_per_node)
        ranks = ",".join(map(str, known))
        options, said = Options(**asked | {"ranks": ranks}), [*words, "--ranks", ranks]
    return Array(("scale", *said), tasks_of(list(given["words"] or []), options))


def _given(verb: str, words: Sequence[str]) -> dict[str, Any]:
    """Return what a verb's own options say, by name. Raise `RecipeError` for one that has no place in an array."""
    given = read_options(verb, words)
    for name in _OURS:
        if given.get(name):
            option = "--list" if name == "list_only" else f"--{name.replace('_', '-')}"
            raise RecipeError(f"{option}: has no place among the options of an array (leave it out)")
    return given
