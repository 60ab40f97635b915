"""Generate the pages of `cli/` from the commands of the program: one page per verb, and an overview.

After a change of a command or an option, run .venv/bin/python docs/reference/make_cli.py
"""

import inspect
import re
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from paceline.cli.app import app

FOLDER = Path(__file__).with_name("cli")
INDEX = "README.md"
GUIDES = Path(__file__).parents[1] / "how-to"
SHOWN_BY = "tests/unit/docs/test_cli_reference.py::test_every_example_is_understood"

_INTRODUCTION = """\
# Command line

Each command's page has the same text as `paceline COMMAND --help`.

- `KEY=VALUE` sets a field of the recipe by its dotted path, as in `optim.lr=0.4`: [all fields](../recipe/README.md).
- `N|auto` means that an option takes a number or the word `auto`.
- Options can appear before, between or after other arguments. Everything after `--` is taken as an argument, not as
  an option; `paceline submit` passes it on to the command that the job runs.
- The [exit code](../exit-codes.md) tells a script how a command ended.
"""
_FOOTER = "\n---\n\n*Generated from the program by [make_cli.py](../make_cli.py).*\n"
_GUIDE_OF = {
    "train": "recipes",
    "eval": "predict",
    "predict": "predict",
    "export": "export",
    "recipes": "recipes",
    "models": "fine-tune",
    "submit": "slurm",
    "doctor": "doctor",
    "profile": "profile",
    "ladder": "lab",
    "scale": "lab",
    "tune": "lab",
    "compare": "lab",
    "report": "report",
    "data": "data",
}
"""The guide that a verb's page links to, if any: a file of `how-to/`."""
# Placeholders of option values by type, for options without a `metavar`.
_PLACEHOLDERS = {int: "N", float: "X", Path: "PATH", str: "TEXT"}


def commands(group: Any, name: str = "paceline") -> Iterator[tuple[str, Any]]:
    """Yield (full name, command) of every verb, in the order of `--help`."""
    for verb, command in group.commands.items():
        if command.hidden:
            continue
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


def pages() -> dict[str, str]:
    """Return the pages by file name: `README.md`, and one per verb, with the commands of a group on one page."""
    program = typer.main.get_group(app)
    found = {INDEX: overview(program)}
    for verb, command in program.commands.items():
        if not command.hidden:
            found[f"{verb}.md"] = verb_page(verb, command)
    return found


def overview(program: Any) -> str:
    """Return the page of all verbs, by their panel in `--help`, and of the options of the program itself."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for name, command in commands(program):
        verb, _, subcommand = name.removeprefix("paceline ").partition(" ")
        anchor = f"#{name.replace(' ', '-')}" if subcommand else ""
        row = (f"[`{name}`]({verb}.md{anchor})", _sentence(command))
        panels.setdefault(getattr(program.commands[verb], "rich_help_panel", None) or "Commands", []).append(row)
    parts = [f"\n## {panel}\n\n{_table(('command', 'what it does'), rows)}" for panel, rows in panels.items()]
    options = _table(("option", "default", "meaning"), _options(program, None))
    return "".join([_INTRODUCTION, *parts, f"\n## Global options\n\n{options}", _FOOTER])


def verb_page(verb: str, command: Any) -> str:
    """Return the page of a verb or of a group of commands."""
    name = f"paceline {verb}"
    parts = [f"# {name}\n\n{_sentence(command)}\n"]
    if isinstance(command, typer.core.TyperGroup):
        group = list(commands(command, name))
        rows = [(f"[`{each}`](#{each.replace(' ', '-')})", _sentence(subcommand)) for each, subcommand in group]
        parts.append("\n" + _table(("command", "what it does"), rows))
        for each, subcommand in group:
            parts += [f"\n## {each}\n\n{_sentence(subcommand)}\n", *section(each, subcommand, "###")]
    else:
        parts += section(name, command, "##")
    if verb in _GUIDE_OF:
        guide = f"{_GUIDE_OF[verb]}.md"
        title = (GUIDES / guide).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        parts.append(f"\nGuide: [{title}](../../how-to/{guide}).\n")
    return "".join([*parts, _FOOTER])


def section(name: str, command: Any, heading: str) -> Iterator[str]:
    """Yield what follows the sentence of a verb. Raise `ValueError` if the verb lacks an example or help.

    `heading` is the mark of the headings of its option panels.
    """
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    yield f"\n```text\n{' '.join([name, '[OPTIONS]', *map(_usage, arguments)])}\n```\n"
    yield f"\nFor example:\n\n<!-- test: shown by {SHOWN_BY} -->\n```sh\n{example(command)}\n```\n"
    if arguments:
        rows = [(_code(each.metavar or each.name), _help(each)) for each in arguments]
        yield "\n" + _table(("argument", "meaning"), rows)
    for panel in dict.fromkeys(each.rich_help_panel for each in command.params if each not in arguments):
        rows = [*_options(command, panel)]
        if rows:
            title = f"\n{heading} {panel}\n" if panel else ""
            yield f"{title}\n{_table(('option', 'default', 'meaning'), rows)}"


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
    if isinstance(option.show_default, str):
        return option.show_default  # a sentence
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


def write() -> None:
    """Write all pages, and remove those of verbs that are gone."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.md"):
        old.unlink()
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
