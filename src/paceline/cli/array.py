"""Build an experiment as a job array: its command and its tasks.

Values that depend on the machine, such as the number of GPUs, are written into the arguments, so that they mean the
same on the nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.cli.scale_verb import measuring_options
from paceline.cli.scale_words import ScaleOptions, read_ranks
from paceline.cli.submit_options import read_options
from paceline.core.errors import RecipeError
from paceline.lab.tasks import ArrayTask

_AUTO_RANKS: Final = "auto"
_NON_ARRAY_OPTIONS: Final = ("run_dir", "task", "list_only")
"""Options that the starter of a task sets, or that start none."""


@dataclass(frozen=True)
class TaskArray:
    """Arguments of `paceline` for a whole experiment, and its tasks.

    With `--run-dir DIR --task K` they run task K. With `--run-dir DIR` alone they run what is missing, and conclude.
    """

    args: tuple[str, ...]
    tasks: tuple[ArrayTask, ...]


def build_array(verb: str, args: Sequence[str], options: Sequence[str], ranks_per_node: int) -> TaskArray:
    """Return the array of `ladder` or `scale` with its arguments and options.

    `ranks_per_node` is the default for `--ranks`. Raise `PacelineError` for arguments that do not fit, and typer's
    usage error for unknown options.
    """
    match verb:
        case "ladder":
            return _ladder_array([*args, *options], ranks_per_node)
        case "scale":
            return _scale_array([*args, *options], ranks_per_node)
    raise RecipeError(f"--array: {verb} has no independent tasks (it is for ladder and scale)")


def _ladder_array(args: list[str], ranks_per_node: int) -> TaskArray:
    from paceline.cli.ladder import plan_ladder_tasks

    given = _read_verb_options("ladder", args)
    ranks, command_args = given["ranks"], args
    if ranks == _AUTO_RANKS:
        ranks, command_args = str(ranks_per_node), [*args, "--ranks", str(ranks_per_node)]
    request = {name: given[name] for name in ("recipe", "steps", "repeats")}
    return TaskArray(("ladder", *command_args), plan_ladder_tasks(list(given["args"] or []), ranks, **request))


def _scale_array(args: list[str], ranks_per_node: int) -> TaskArray:
    from paceline.cli.scale import list_scale_tasks

    given = _read_verb_options("scale", args)
    request = {
        name: value for name, value in measuring_options(given).items() if name not in (*_NON_ARRAY_OPTIONS, "own_code")
    }
    options, command_args = ScaleOptions(**request), args
    if options.ranks == _AUTO_RANKS:
        known = [ranks_per_node] if options.is_study else read_ranks(_AUTO_RANKS, ranks_per_node)
        ranks = ",".join(map(str, known))
        options, command_args = ScaleOptions(**request | {"ranks": ranks}), [*args, "--ranks", ranks]
    return TaskArray(("scale", *command_args), list_scale_tasks(list(given["args"] or []), options))


def _read_verb_options(verb: str, args: Sequence[str]) -> dict[str, Any]:
    """Return a verb's options by parameter name. Raise `RecipeError` for one that an array cannot have."""
    given = read_options(verb, args)
    for name in _NON_ARRAY_OPTIONS:
        if given.get(name):
            option = "--list" if name == "list_only" else f"--{name.replace('_', '-')}"
            raise RecipeError(f"{option}: is not an option of an array (leave it out)")
    return given
