"""The pages of the command line say what the program reads, and their examples are understood."""

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


PAGES = {path.name: path.read_text() for path in MAKE.FOLDER.glob("*.md")}


def test_the_pages_are_what_the_program_reads() -> None:
    assert MAKE.pages() == PAGES, "run .venv/bin/python docs/reference/make_cli.py"


def test_every_verb_and_option_is_on_its_page() -> None:
    assert {"paceline train", "paceline data pack", "paceline compare"} <= set(COMMANDS)
    options = 0
    for name, command in COMMANDS.items():
        _, verb, *rest = name.split()
        text = PAGES[f"{verb}.md"]
        assert f"[`{name}`]({verb}.md" in PAGES["README.md"]
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0] if rest else text
        for option in command.params:
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
        list(MAKE.section("paceline documented", documented, "##"))
