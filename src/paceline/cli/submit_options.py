"""The options of a verb that is to run in a job, read as the verb itself reads them.

What it does not have is refused now, and not when the job starts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.main import get_command

from paceline.cli import lab_verbs, run_verbs, scale_verb
from paceline.core.errors import RecipeError


def read_options(verb: str, words: Sequence[str]) -> dict[str, Any]:
    """Return what the words after a verb say, by the name of the argument or option.

    Raise a usage error of typer's for options that the verb does not have.
    """
    program = typer.Typer(add_completion=False)
    program.command(verb)(_function(verb))
    return get_command(program).make_context(verb, list(words)).params


def check_options(verb: str, words: Sequence[str], options: Sequence[str]) -> None:
    """Raise `RecipeError` for a word among a verb's options, and typer's usage error for those it does not have."""
    if verb == "eval" and not words:
        return  # that a run is missing is told in its own words
    given = read_options(verb, [*words, *options])
    said = [given["run"], *(given["overrides"] or [])] if verb == "eval" else given["words"] or []
    if len(said) > len(words):
        word = str(said[len(words)])
        raise RecipeError(f"{word!r}: stands among the options of {verb} (write it before `--`)")


def _function(verb: str) -> Callable[..., int]:
    functions: dict[str, Callable[..., int]] = {
        "train": run_verbs.train,
        "eval": run_verbs.evaluate,
        "ladder": lab_verbs.ladder,
        "scale": scale_verb.scale,
        "tune": lab_verbs.tune,
        "profile": lab_verbs.profile,
    }
    return functions[verb]
