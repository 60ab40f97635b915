"""Write `cli.md` from the program's own options, so that the page cannot say anything else than `--help` does.

Once an option has changed: .venv/bin/python docs/reference/make_cli.py
"""

import inspect
import re
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from paceline.cli.app import app

PAGE = Path(__file__).with_name("cli.md")
SHOWN_BY = "tests/unit/docs/test_cli_reference.py::test_every_example_is_understood"

_INTRODUCTION = """\
# The command line

This page is written by [make_cli.py](make_cli.py) from what the program itself reads; a test fails when the two differ.
`paceline VERB --help` says the same.

- `KEY=VALUE` sets a field of the recipe by its dotted path, `optim.lr=0.4`: [all fields](recipe.md).
- `N|auto` and the like are what an option takes: a number, or the word.
- Options may stand before, between and behind other words. `--` ends them.
- [Exit codes](exit-codes.md) say how it went.

"""
_TAKES = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
"""What an option takes that does not say it itself, by its type."""


def commands(group: Any, name: str = "paceline") -> Iterator[tuple[str, Any]]:
    """Yield (its whole name, the command) of every verb, in the order of `--help`."""
    for word, command in group.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            yield from commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def example(command: Any) -> str:
    """Return the example of a verb, which has `paceline` in it. Raise `ValueError` where it has none."""
    found = re.fullmatch(r"Example: `([^`]+)`", command.epilog or "")
    if found is None:
        raise ValueError(f"{command.name}: {command.epilog!r} is no example (write epilog='Example: `paceline ...`')")
    return found[1]


def page() -> str:
    """Return the page."""
    program = typer.main.get_group(app)
    verbs = list(commands(program))
    links = [(f"[`{name}`](#{name.replace(' ', '-')})", _sentence(command)) for name, command in verbs]
    own = _table(("option", "default", "meaning"), _options(program, None))
    parts = [_INTRODUCTION, _table(("verb", "what it does"), links), f"\nOf the program itself:\n\n{own}"]
    return "".join([*parts, *(part for name, command in verbs for part in section(name, command))])


def section(name: str, command: Any) -> Iterator[str]:
    """Yield the parts of the section of a verb. Raise `ValueError` for one without example or help."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    yield f"\n## {name}\n\n{_sentence(command)}\n\n"
    yield f"```text\n{' '.join([name, '[OPTIONS]', *map(_usage, arguments)])}\n```\n"
    yield f"\nFor example:\n\n<!-- test: shown by {SHOWN_BY} -->\n```sh\n{example(command)}\n```\n"
    if arguments:
        rows = [(_code(each.metavar or each.name), _help(each)) for each in arguments]
        yield "\n" + _table(("argument", "meaning"), rows)
    for panel in dict.fromkeys(each.rich_help_panel for each in command.params if each not in arguments):
        heading = f"\n### {panel}\n" if panel else ""
        yield f"{heading}\n{_table(('option', 'default', 'meaning'), _options(command, panel))}"


def _sentence(command: Any) -> str:
    return " ".join((command.help or "").split())


def _usage(argument: Any) -> str:
    said = argument.metavar or argument.name.upper()
    said = said if argument.required or said.startswith("[") else f"[{said}]"
    return f"{said}..." if argument.nargs == -1 and not said.endswith("...") else said


def _options(command: Any, panel: str | None) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each option of a panel: what is written, what holds without it, and what it means."""
    hints = typing.get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    for option in command.params:
        if option.param_type_name == "option" and option.rich_help_panel == panel and not option.hidden:
            names = "/".join([*option.opts, *option.secondary_opts])
            takes, bounds = _value(hints[option.name])
            shown = names if option.is_flag else f"{names} {option.metavar or takes}"
            yield _code(shown), _default(option), f"{_help(option)}{bounds}"


def _value(annotation: Any) -> tuple[str, str]:
    """Return what an option takes, and between which bounds, as a sentence or nothing."""
    kind, option = typing.get_args(annotation)
    takes = next((word for each, word in _TAKES.items() if each in {kind, *typing.get_args(kind)}), "TEXT")
    if option.min is None:
        return takes, ""
    return takes, f" At least {option.min}." if option.max is None else f" {option.min} to {option.max}."


def _default(option: Any) -> str:
    if option.is_flag:
        return _code(option.opts[0] if option.default else option.secondary_opts[0]) if option.secondary_opts else ""
    return "" if option.default is None or not option.show_default else _code(str(option.default))


def _help(param: Any) -> str:
    """Return what the program says of it. Raise `ValueError` where it says nothing."""
    if not param.help:
        raise ValueError(f"{param.name}: says nothing (write help=...)")
    return " ".join(param.help.split()).replace("|", r"\|")


def _code(text: str) -> str:
    return f"`{text}`".replace("|", r"\|")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
