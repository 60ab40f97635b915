"""The page of the command line says what the program reads, and its examples are understood."""

import importlib.util
import shlex
from pathlib import Path

import pytest
import typer

from paceline.cli.app import app
from paceline.cli.submit_jobs import parse_submit_args

ROOT = Path(__file__).parents[3]
PLACE = ROOT / "docs" / "reference" / "make_cli.py"
SPEC = importlib.util.spec_from_file_location("make_cli", PLACE)
assert SPEC and SPEC.loader
MAKE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(MAKE)
COMMANDS = dict(MAKE.commands(typer.main.get_group(app)))


def test_the_page_is_what_the_program_reads() -> None:
    assert MAKE.PAGE.read_text() == MAKE.page(), "run .venv/bin/python docs/reference/make_cli.py"


def test_every_verb_and_option_is_on_the_page() -> None:
    text = MAKE.PAGE.read_text()
    assert {"paceline train", "paceline data pack", "paceline compare"} <= set(COMMANDS)
    sections = dict(zip(COMMANDS, text.split("\n## ")[1:], strict=True))
    options = 0
    for name, section in sections.items():
        assert section.startswith(f"{name}\n")
        for option in COMMANDS[name].params:
            if option.param_type_name == "option" and not option.hidden:
                options += 1
                assert all(
                    f"{word}`" in section or f"{word} " in section or f"{word}/" in section for word in option.opts
                )
    assert options > 100


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_is_understood(name: str) -> None:
    args = shlex.split(MAKE.example(COMMANDS[name]))
    args = args[args.index("paceline") :]
    verb = name.split()
    assert args[: len(verb)] == verb
    context = COMMANDS[name].make_context(name, args[len(verb) :])
    if name == "paceline submit":
        assert parse_submit_args(context.params["args"]).verb == "train"


def test_a_verb_without_an_example_and_an_option_without_help_are_refused() -> None:
    program = typer.Typer()
    program.command()(lambda: None)
    program.command("documented", epilog="Example: `paceline documented`")(lambda word: None)
    silent, documented = typer.main.get_group(program).commands.values()
    with pytest.raises(ValueError, match="no example"):
        MAKE.example(silent)
    assert MAKE.example(documented) == "paceline documented"
    with pytest.raises(ValueError, match="no help text"):
        list(MAKE.section("paceline documented", documented))
