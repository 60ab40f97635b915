"""Read the options of a submitted verb with the verb's own parser, so that errors appear now and not when the job
starts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.main import get_command

from paceline.cli import lab_verbs, run_verbs, scale_verb
from paceline.core.errors import RecipeError


def read_options(verb: str, args: Sequence[str]) -> dict[str, Any]:
    """Return the parsed arguments and options of a verb, by parameter name.

    Raise typer's usage error for an unknown option.
    """
    program = typer.Typer(add_completion=False)
    program.command(verb)(_verb_function(verb))
    return get_command(program).make_context(verb, list(args)).params


def check_options(verb: str, args: Sequence[str], options: Sequence[str]) -> None:
    """Raise `RecipeError` for an argument among a verb's options, and typer's usage error for unknown options."""
    if verb == "eval" and not args:
        return  # a missing run has a message of its own
    given = read_options(verb, [*args, *options])
    given_args = [given["run"], *(given["overrides"] or [])] if verb == "eval" else given["args"] or []
    if len(given_args) > len(args):
        word = str(given_args[len(args)])
        raise RecipeError(f"{word!r}: is among the options of {verb} (write it before `--`)")


def _verb_function(verb: str) -> Callable[..., int]:
    functions: dict[str, Callable[..., int]] = {
        "train": run_verbs.train,
        "eval": run_verbs.evaluate,
        "ladder": lab_verbs.ladder,
        "scale": scale_verb.scale,
        "tune": lab_verbs.tune,
        "profile": lab_verbs.profile,
    }
    return functions[verb]
