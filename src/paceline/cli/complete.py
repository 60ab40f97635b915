"""Shell completion: candidates for the last word of a command line."""

import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

from paceline.cli.options import JOB_VERBS
from paceline.core.errors import RecipeError
from paceline.core.run_dir import is_run

SHELLS: Final = ("bash", "fish", "zsh")

_NAME: Final = re.compile(r"[A-Z]{2,}(?:=[A-Z]+)?")
_WORD: Final = re.compile(r"[a-z][a-z0-9_-]*")


def completion_script(shell: str) -> str:
    """Return the completion script of `shell`. Raise `RecipeError` for one not in SHELLS."""
    if shell not in SHELLS:
        raise RecipeError(f"--show-completion: {shell!r} is not a supported shell (use {', '.join(SHELLS)})")
    return resources.files("paceline.cli").joinpath("completion", f"paceline.{shell}").read_text(encoding="utf-8")


def complete(args: Sequence[str], program: Any) -> list[str]:
    """Return the candidates for the last of `args`, the words after `paceline`.

    `program` is the click command of the app, from `typer.main.get_command`.
    """
    *before, last = args or [""]
    command, given = _find_command(program, before)
    return [each for each in _candidates(command, given, last) if each.startswith(last)]


def _find_command(command: Any, args: Sequence[str]) -> tuple[Any, list[str]]:
    for number, word in enumerate(args):
        verbs = getattr(command, "commands", {})
        if word in verbs:
            return _find_command(verbs[word], args[number + 1 :])
    return command, list(args)


def _candidates(command: Any, given: Sequence[str], last: str) -> Iterable[str]:
    known = [each for each in command.params if each.param_type_name == "option"]
    options = {name: each for each in known for name in (*each.opts, *each.secondary_opts)}
    pending = options.get(given[-1]) if given else None
    if pending is not None and not pending.is_flag:
        return _metavar_choices(pending.metavar)
    if last.startswith("-"):
        return sorted([*(name for name in options if name.startswith("--") and not options[name].hidden), "--help"])
    before = list(_positional_args(given, options))
    if verbs := getattr(command, "commands", {}):
        return () if before else verbs  # nothing can follow an unknown verb
    return _argument_candidates(command, [word for word in before if "=" not in word], last)


def _positional_args(given: Sequence[str], options: dict[str, Any]) -> Iterator[str]:
    """Yield the words that are neither options nor their values."""
    takes = False
    for word in given:
        if not takes and not word.startswith("-"):
            yield word
        takes = not takes and word in options and not options[word].is_flag


def _argument_candidates(command: Any, before: Sequence[str], last: str) -> Iterator[str]:
    """Yield candidates for the positional argument after `before`."""
    metavars = [_NAME.findall(each.metavar or "") for each in command.params if each.param_type_name == "argument"]
    expected = metavars[min(len(before), len(metavars) - 1)] if metavars else []
    if "COMMAND" in expected:
        yield from () if before else JOB_VERBS
        before = before[1:] if before and before[0] in JOB_VERBS else before
    is_first = len(before) < len(metavars)
    if is_first and {"RECIPE", "NAME", "SRC"} & {*expected}:
        yield from _recipe_names()
    if is_first and "LADDER" in expected:
        yield from _ladder_names()
    if "RUN" in expected or (is_first and "RECIPE" in expected):
        yield from _run_paths()
    # Overrides may stand anywhere among the arguments.
    if any("KEY=VALUE" in names for names in metavars):
        yield from _field_candidates(last)


def _metavar_choices(metavar: str | None) -> list[str]:
    return [each for each in (metavar or "").split("|") if _WORD.fullmatch(each)]


def _recipe_names() -> list[str]:
    from paceline.recipe.load import preset_names

    return preset_names()


def _ladder_names() -> list[str]:
    from paceline.lab.ladder_file import list_ladders

    return list_ladders()


def _run_paths() -> list[str]:
    """Return the run directories in `runs/`."""
    paths = (str(path) for path in Path().glob("runs/*") if is_run(path))
    # Shells read one candidate per line: leave out names with a newline.
    return sorted(name for name in paths if name.isprintable())


def _field_candidates(last: str) -> Iterator[str]:
    """Yield sections, then the fields of a section, then the values of a field."""
    from paceline.recipe.errors import choices

    known = choices()
    field, is_set, _ = last.partition("=")
    if is_set:
        yield from (f"{field}={value}" for value in known.get(field, ()))
    elif last:
        yield from (f"{each}=" for each in known)
    else:
        heads = (path.partition(".") for path in known)
        yield from dict.fromkeys(f"{head}." if rest else f"{head}=" for head, _, rest in heads)
