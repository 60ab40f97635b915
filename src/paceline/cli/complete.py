"""What the last word of a command line may become, for shells: verbs, options, recipes, ladders, runs, fields, values.

It is read from what verbs say of their arguments: `RECIPE|KEY=VALUE` takes recipes and fields, `RUN` run directories,
and an option that takes `onnx|torch` takes these words. Where it may be a file, the answer is nothing, and the shell
completes files. Shells ask by `paceline --complete WORDS`.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

from paceline.cli.submit_words import VERBS
from paceline.core.errors import RecipeError
from paceline.core.rundir import is_run

SHELLS: Final = ("bash", "fish", "zsh")

_NAME: Final = re.compile(r"[A-Z]{2,}(?:=[A-Z]+)?")
_WORD: Final = re.compile(r"[a-z][a-z0-9_-]*")


def script(shell: str) -> str:
    """Return what `shell` reads so that it completes paceline's words. Raise `RecipeError` for another than SHELLS."""
    if shell not in SHELLS:
        raise RecipeError(f"--show-completion: {shell!r} is no shell it is there for (take {', '.join(SHELLS)})")
    return resources.files("paceline.cli").joinpath("completion", f"paceline.{shell}").read_text(encoding="utf-8")


def complete(words: Sequence[str], program: Any) -> list[str]:
    """Return what the last of `words` may become; the words are those behind `paceline`, the last one may be empty.

    `program` is the command line, as `typer.main.get_command` returns it.
    """
    *before, last = words or [""]
    command, given = _verb_of(program, before)
    return [each for each in _candidates(command, given, last) if each.startswith(last)]


def _verb_of(command: Any, words: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the verb that `words` name, and the words behind it."""
    for number, word in enumerate(words):
        verbs = getattr(command, "commands", {})
        if word in verbs:
            return _verb_of(verbs[word], words[number + 1 :])
    return command, list(words)


def _candidates(command: Any, given: Sequence[str], last: str) -> Iterable[str]:
    known = [each for each in command.params if each.param_type_name == "option"]
    options = {name: each for each in known for name in (*each.opts, *each.secondary_opts)}
    asked = options.get(given[-1]) if given else None
    if asked is not None and not asked.is_flag:
        return _choices(asked.metavar)
    if last.startswith("-"):
        return sorted([*(name for name in options if name.startswith("--") and not options[name].hidden), "--help"])
    before = list(_positional(given, options))
    if verbs := getattr(command, "commands", {}):
        return () if before else verbs  # behind a word that is no verb, nothing is known
    return _of_argument(command, [word for word in before if "=" not in word], last)


def _positional(given: Sequence[str], options: dict[str, Any]) -> Iterator[str]:
    """Yield the words of `given` that are neither options nor what these take."""
    takes = False
    for word in given:
        if not takes and not word.startswith("-"):
            yield word
        takes = not takes and word in options and not options[word].is_flag


def _of_argument(command: Any, before: Sequence[str], last: str) -> Iterator[str]:
    """Yield what the argument behind `before` may be; fields are no such words, and may stand anywhere."""
    said = [_NAME.findall(each.metavar or "") for each in command.params if each.param_type_name == "argument"]
    here = said[min(len(before), len(said) - 1)] if said else []
    if "VERB" in here:
        yield from () if before else VERBS
        before = before[1:] if before and before[0] in VERBS else before
    is_first = len(before) < len(said)
    if is_first and {"RECIPE", "NAME", "SRC"} & {*here}:
        yield from _recipes()
    if is_first and "LADDER" in here:
        yield from _ladders()
    if "RUN" in here or (is_first and "RECIPE" in here):
        yield from _runs()
    if any("KEY=VALUE" in names for names in said):
        yield from _fields(last)


def _choices(metavar: str | None) -> list[str]:
    """Return the words among what an option takes: `auto` of `N|auto`."""
    return [each for each in (metavar or "").split("|") if _WORD.fullmatch(each)]


def _recipes() -> list[str]:
    from paceline.recipe.load import preset_names

    return preset_names()


def _ladders() -> list[str]:
    from paceline.lab.rungs import ladder_names

    return ladder_names()


def _runs() -> list[str]:
    """Return the run directories in `runs/`, where they are written unless a folder is named.

    Those that do not fit in a line are left out: shells read one candidate from each.
    """
    found = (str(path) for path in Path().glob("runs/*") if is_run(path))
    return sorted(name for name in found if name.isprintable())


def _fields(last: str) -> Iterator[str]:
    """Yield the sections of a recipe; once one has begun, its fields; and once there is a field, its values."""
    from paceline.recipe.fields import choices

    known = choices()
    field, is_set, _ = last.partition("=")
    if is_set:
        yield from (f"{field}={value}" for value in known.get(field, ()))
    elif last:
        yield from (f"{each}=" for each in known)
    else:
        heads = (path.partition(".") for path in known)
        yield from dict.fromkeys(f"{head}." if rest else f"{head}=" for head, _, rest in heads)
