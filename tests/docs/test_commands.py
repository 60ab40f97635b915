"""Every command of every page is executed in a shell as it is written, or a mark above it explains why not.

`test_tutorial.py` follows the pages of the tutorial with the installed wheel, unchanged. Commands that would take too
long are executed here, with the arguments of their marks; the others are only parsed. The gate runs the README and
most pages in `coming-from`, `make test-long` all others; both check the arguments of every command.
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from paceline.recipe.schema import Recipe
from paceline.recipe.yaml import read_yaml_file

from .commands import MARKS, NEEDS, ROOT, Block, Command, how_tested, pages, read_blocks, read_commands
from .understood import is_field, load_recipe, options_of, parse


def page_blocks(page: Path) -> list[Block]:
    """Return the blocks of `page` except those that only `test_tutorial.py` executes."""
    is_tutorial = page.parent.name == "tutorial"
    return [block for block in read_blocks(page) if block.mark.kind == "with" or not is_tutorial]


PAGES = [page for page in pages() if read_blocks(page)]
TYPED = [
    page
    for page in PAGES
    if {"sh", "python"} & {block.language for block in page_blocks(page) if block.mark.is_executed}
]
LANGUAGES = ("", "sh", "python", "yaml", "json", "text")
INLINE = re.compile(r"`((?:[a-z]+ )?paceline [a-z][^`]*)`")
HIDDEN = re.compile(r"^(?:\$ |\w+=\S+ )*(?:paceline|torchrun) (?!…:)", re.MULTILINE)
GENERATED = ROOT / "docs" / "reference" / "cli"
PLACEHOLDER = re.compile(r"<\w+>")
RUN = "runs/placeholder"
FAILED = ": failed: "
"""Output of a study for a failed run, after which it continues."""
LEAST_EXECUTED = 0.69
MORE_LADDERS = ("acceleration-study", "dataparallel-post")
"""Pages in `coming-from` with ladders and profiles of a minute, beside those of `nersc-sc20` and `jsc`."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def typed_when(page: Path) -> ParameterSet:
    """Return `page` as a test parameter, marked `long` unless the gate runs it."""
    is_short = name_of(page) == "README.md" or (page.parent.name == "coming-from" and page.stem not in MORE_LADDERS)
    return pytest.param(page, id=name_of(page), marks=() if is_short else pytest.mark.long)


def shell_blocks() -> Iterator[Block]:
    for page in PAGES:
        yield from (block for block in read_blocks(page) if block.language == "sh")


def commands() -> Iterator[tuple[Block, Command]]:
    """Yield every command with `paceline` in it and its block; placeholders become a run directory."""
    for block in shell_blocks():
        for command in read_commands(PLACEHOLDER.sub(RUN, block.text)):
            if command.paceline:
                yield block, command


@pytest.mark.timeout(900)  # for a whole page and the home that the first page needs; each block has its own limit
@pytest.mark.parametrize("page", [typed_when(page) for page in TYPED])
def test_the_commands_of_a_page_succeed(page: Path, shell, folder: Path, environ, filled) -> None:
    for number, block in enumerate(page_blocks(page)):
        match block.language, block.mark.kind:
            case _, "file":
                path = folder / block.mark.argument.replace("~", environ["HOME"])
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text)
            case "sh", _ if block.mark.is_executed:
                completed = shell.types(filled(block.text), folder, environ, block.mark)
                code = int(block.mark.argument) if block.mark.kind == "fails" else 0
                assert completed.returncode == code, f"{block.place}\n{completed.stdout}"
                assert FAILED not in completed.stdout, f"{block.place}\n{completed.stdout}"
                runnable = [command for command in read_commands(filled(block.text)) if not command.needs]
                started = [command for command in runnable if command.program in ("paceline", "python", "torchrun")]
                assert len(shell.typed) >= len(started), f"{block.place}: {shell.typed}"  # and those in `$(...)`
            case "python", "":
                (folder / f"block_{number}.py").write_text(block.text)
                completed = shell.types(f"python block_{number}.py", folder, environ)
                assert completed.returncode == 0, f"{block.place}\n{completed.stdout}"


def test_every_command_has_valid_verbs_and_options() -> None:
    """typer itself rejects unknown verbs and options, in executed commands and in all others."""
    seen = set()
    for block, command in commands():
        verb, *args = command.paceline or ()
        if verb.startswith("-"):
            continue
        seen.add(verb)
        parse(f"{block.place}: {verb}", verb, args)
    assert {"train", "eval", "predict", "export", "submit", "data", "doctor", "ladder", "scale", "compare"} <= seen


def test_commands_within_a_line_have_valid_verbs_options_and_fields() -> None:
    """They may lack arguments, so they are not executed; those of docs/coming-from are, by `test_small_commands.py`."""
    schema = Recipe.model_json_schema()
    found = 0
    for page in PAGES:
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for line in INLINE.findall(text):
            for command in read_commands(line):
                known = options_of(command.paceline) if command.paceline else set()
                for word in command.paceline or ():
                    name, sign, _ = word.partition("=")
                    if word.startswith("--") and word != "--":
                        assert name in known, f"{name_of(page)}: {line}: {name} is no option"
                    elif sign and "." in name and name.partition(".")[0] not in ("slurm", "kubernetes"):
                        assert is_field(name.split("."), [schema], schema), f"{name_of(page)}: {line}: no field {name}"
            found += 1
    assert found > 150


def test_the_recipe_of_every_command_that_is_not_executed_unchanged_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, choices and cluster options are checked too; named runs and files do not exist here."""
    monkeypatch.setattr(
        "paceline.recipe.load.read_yaml_file", cache(read_yaml_file)
    )  # some 30 files, each of them many times
    found = 0
    for block, command in commands():
        is_typed = block.page.parent.name == "tutorial" and block.mark.kind != "needs"
        is_checked = not is_typed and not any(RUN in word for word in command.words)
        if is_checked and (block.mark.kind == "with" or how_tested(block, command) != "executed"):
            found += load_recipe(command.paceline or ())
    assert found > 90


def test_every_override_is_a_field_of_the_recipe() -> None:
    schema = Recipe.model_json_schema()
    found = 0
    for block, command in commands():
        for word in () if block.mark.kind == "fails" else command.paceline or ():
            path = re.fullmatch(r"([a-z_]+(?:\.[a-z_0-9]+)*)=.*", word, re.DOTALL)
            if path is None or path[1].partition(".")[0] in ("slurm", "kubernetes"):
                continue
            found += 1
            assert is_field(path[1].split("."), [schema], schema), f"{block.place}: {path[1]} is no field"
    assert found > 50


def test_every_test_named_by_a_mark_exists() -> None:
    for page in PAGES:
        for block in read_blocks(page):
            if block.mark.kind == "shown by":
                path, _, name = block.mark.argument.partition("::")
                assert f"def {name}(" in (ROOT / path).read_text(), (
                    f"{block.place}: {block.mark.argument} does not exist"
                )


def test_most_commands_are_executed(record_property) -> None:
    census = Counter(how_tested(block, command) for block, command in commands())
    for how, number in census.most_common():
        record_property(how, number)
    print(dict(census.most_common()))
    kinds = {"executed", "dry-run", "shown by a test", "a file", *(f"needs {each}" for each in NEEDS)}
    assert census.keys() <= kinds
    assert census["executed"] >= LEAST_EXECUTED * census.total(), census


def test_commands_of_the_documentation_that_are_not_executed_need_a_gpu_or_a_cluster() -> None:
    found = 0
    for block, command in commands():
        if block.page.parent == ROOT or block.page.is_relative_to(ROOT / "docs"):
            found += 1
            how = how_tested(block, command)
            assert not how.startswith("needs") or how in ("needs gpu", "needs cluster"), f"{block.place}: {how}"
    assert found > 200


def test_commands_are_only_in_sh_blocks() -> None:
    """Commands are in `sh` blocks, which are executed; the usage of each verb is on a generated page."""
    kinds = {"sh": {*MARKS, ""} - {"fragment"}, "python": {"", "file", "fragment", "needs", "shown by"}}
    for page in PAGES:
        for block in read_blocks(page):
            assert block.language in LANGUAGES, f"{block.place}: {block.language} is none of {', '.join(LANGUAGES)}"
            assert block.mark.kind in kinds.get(block.language, {*MARKS, ""}), (
                f"{block.place}: {block.mark.kind} is not for it"
            )
            is_typed = block.language == "sh" or block.mark.kind == "file" or page.parent == GENERATED
            assert is_typed or not HIDDEN.search(block.text), f"{block.place}: is for sh"
