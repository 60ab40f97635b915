"""Generate `cli.md` from the options of the program.

After a change of an option, run .venv/bin/python docs/reference/make_cli.py
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
# Placeholders of option values by type, for options without a `metavar`.
_PLACEHOLDERS = {int: "N", float: "X", Path: "PATH", str: "TEXT"}


def commands(group: Any, name: str = "paceline") -> Iterator[tuple[str, Any]]:
    """Yield (full name, command) of every verb, in the order of `--help`."""
    for verb, command in group.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            yield from commands(command, f"{name} {verb}")
        else:
            yield f"{name} {verb}", command


def example(command: Any) -> str:
    """Return the example in a verb's epilog. Raise `ValueError` if there is none."""
    match = re.fullmatch(r"Example: `([^`]+)`", command.epilog or "")
    if match is None:
        raise ValueError(f"{command.name}: {command.epilog!r} is no example (write epilog='Example: `paceline ...`')")
    return match[1]


def page() -> str:
    """Return the page."""
    program = typer.main.get_group(app)
    verbs = list(commands(program))
    links = [(f"[`{name}`](#{name.replace(' ', '-')})", _sentence(command)) for name, command in verbs]
    global_options = _table(("option", "default", "meaning"), _options(program, None))
    parts = [_INTRODUCTION, _table(("verb", "what it does"), links), f"\nOf the program itself:\n\n{global_options}"]
    return "".join([*parts, *(part for name, command in verbs for part in section(name, command))])


def section(name: str, command: Any) -> Iterator[str]:
    """Yield the parts of a verb's section. Raise `ValueError` if the verb lacks an example or help."""
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
    text = argument.metavar or argument.name.upper()
    text = text if argument.required or text.startswith("[") else f"[{text}]"
    return f"{text}..." if argument.nargs == -1 and not text.endswith("...") else text


def _options(command: Any, panel: str | None) -> Iterator[tuple[str, str, str]]:
    """Yield (option, default, meaning) for each option of a panel."""
    hints = typing.get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    for option in command.params:
        if option.param_type_name == "option" and option.rich_help_panel == panel and not option.hidden:
            names = "/".join([*option.opts, *option.secondary_opts])
            placeholder, bounds = _value(hints[option.name])
            shown = names if option.is_flag else f"{names} {option.metavar or placeholder}"
            yield _code(shown), _default(option), f"{_help(option)}{bounds}"


def _value(annotation: Any) -> tuple[str, str]:
    """Return an option's placeholder, and its bounds as a sentence ("" for none)."""
    kind, option = typing.get_args(annotation)
    placeholder = next((name for each, name in _PLACEHOLDERS.items() if each in {kind, *typing.get_args(kind)}), "TEXT")
    if option.min is None:
        return placeholder, ""
    return placeholder, f" At least {option.min}." if option.max is None else f" {option.min} to {option.max}."


def _default(option: Any) -> str:
    if option.is_flag:
        return _code(option.opts[0] if option.default else option.secondary_opts[0]) if option.secondary_opts else ""
    return "" if option.default is None or not option.show_default else _code(str(option.default))


def _help(param: Any) -> str:
    """Return the help text of a parameter. Raise `ValueError` if there is none."""
    if not param.help:
        raise ValueError(f"{param.name}: has no help text (write help=...)")
    return " ".join(param.help.split()).replace("|", r"\|")


def _code(text: str) -> str:
    return f"`{text}`".replace("|", r"\|")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
