"""Every command of every page is typed into a shell as it stands there, or a mark above it says why not.

The pages of the tutorial are followed by `test_tutorial.py`, from the wheel, as they stand. What would take too
long so is typed here, with the words of its mark; the rest of them is only read. `make test` types the README and the
pages for those who come from elsewhere, `make test-long` all others; both check every command's words.
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
from .understood import is_field, load_recipe, parse


def page_blocks(page: Path) -> list[Block]:
    """Return the blocks of `page` that are not for `test_tutorial.py` alone."""
    is_tutorial = page.parent.name == "tutorial"
    return [block for block in read_blocks(page) if block.mark.kind == "with" or not is_tutorial]


PAGES = [page for page in pages() if read_blocks(page)]
TYPED = [
    page
    for page in PAGES
    if {"sh", "python"} & {block.language for block in page_blocks(page) if block.mark.is_executed}
]
LANGUAGES = ("", "sh", "python", "yaml", "json", "text")
HIDDEN = re.compile(r"^(?:\$ |\w+=\S+ )*(?:paceline|torchrun) (?!…:)", re.MULTILINE)
MADE = ROOT / "docs" / "reference" / "cli.md"
PLACEHOLDER = re.compile(r"<\w+>")
RUN = "runs/placeholder"
FAILED = ": failed: "
"""What a study says of a run that came to nothing, and goes on with the next."""
LEAST_EXECUTED = 0.69


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def typed_when(page: Path) -> ParameterSet:
    """Return `page` as a test's parameter, marked `long` unless `make test` types it."""
    is_short = (page.name == "README.md" and page.parent == ROOT) or page.parent.name in ("coming-from", "tutorial")
    return pytest.param(page, id=name_of(page), marks=() if is_short else pytest.mark.long)


def shell_blocks() -> Iterator[Block]:
    for page in PAGES:
        yield from (block for block in read_blocks(page) if block.language == "sh")


def commands() -> Iterator[tuple[Block, Command]]:
    """Yield every command that has `paceline` in it, with its block; placeholders are a run directory."""
    for block in shell_blocks():
        for command in read_commands(PLACEHOLDER.sub(RUN, block.text)):
            if command.paceline:
                yield block, command


@pytest.mark.timeout(900)  # for a whole page, and for the home that the first one needs; each block has its own limit
@pytest.mark.parametrize("page", [typed_when(page) for page in TYPED])
def test_what_a_page_tells_to_type_does_as_it_says(page: Path, hand, folder: Path, environ, filled) -> None:
    for number, block in enumerate(page_blocks(page)):
        match block.language, block.mark.kind:
            case _, "file":
                path = folder / block.mark.argument.replace("~", environ["HOME"])
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text)
            case "sh", _ if block.mark.is_executed:
                completed = hand.types(filled(block.text), folder, environ, block.mark)
                code = int(block.mark.argument) if block.mark.kind == "fails" else 0
                assert completed.returncode == code, f"{block.place}\n{completed.stdout}"
                assert FAILED not in completed.stdout, f"{block.place}\n{completed.stdout}"
                runnable = [command for command in read_commands(filled(block.text)) if not command.needs]
                started = [command for command in runnable if command.program in ("paceline", "python", "torchrun")]
                assert len(hand.typed) >= len(started), f"{block.place}: {hand.typed}"  # and those in `$(...)`
            case "python", "":
                (folder / f"block_{number}.py").write_text(block.text)
                completed = hand.types(f"python block_{number}.py", folder, environ)
                assert completed.returncode == 0, f"{block.place}\n{completed.stdout}"


def test_every_command_is_one_that_the_program_has() -> None:
    """Unknown verbs and options are told by typer itself, for commands that are executed as for all others."""
    seen = set()
    for block, command in commands():
        verb, *words = command.paceline or ()
        if verb.startswith("-"):
            continue
        seen.add(verb)
        parse(f"{block.place}: {verb}", verb, words)
    assert {"train", "eval", "predict", "export", "submit", "data", "doctor", "ladder", "scale", "compare"} <= seen


def test_the_recipe_of_every_command_that_is_not_executed_as_it_stands_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and choices are checked too, and the words about a cluster; a run or a file that is named is not here."""
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


def test_every_test_that_a_mark_names_exists() -> None:
    for page in PAGES:
        for block in read_blocks(page):
            if block.mark.kind == "shown by":
                path, _, name = block.mark.argument.partition("::")
                assert f"def {name}(" in (ROOT / path).read_text(), (
                    f"{block.place}: {block.mark.argument} does not exist"
                )


def test_most_commands_are_really_executed(record_property) -> None:
    census = Counter(how_tested(block, command) for block, command in commands())
    for how, number in census.most_common():
        record_property(how, number)
    print(dict(census.most_common()))
    kinds = {"executed", "dry-run", "shown by a test", "a file", *(f"needs {each}" for each in NEEDS)}
    assert census.keys() <= kinds
    assert census["executed"] >= LEAST_EXECUTED * census.total(), census


def test_a_command_of_the_readme_or_the_docs_that_is_not_executed_needs_a_gpu_or_a_cluster() -> None:
    found = 0
    for block, command in commands():
        if block.page.parent == ROOT or block.page.is_relative_to(ROOT / "docs"):
            found += 1
            how = how_tested(block, command)
            assert not how.startswith("needs") or how in ("needs gpu", "needs cluster"), f"{block.place}: {how}"
    assert found > 200


def test_no_block_hides_a_command_behind_its_language_or_its_mark() -> None:
    """Commands are in blocks for `sh`, which are typed; how each is used is in a page that is made."""
    kinds = {"sh": {*MARKS, ""} - {"fragment"}, "python": {"", "file", "fragment", "needs", "shown by"}}
    for page in PAGES:
        for block in read_blocks(page):
            assert block.language in LANGUAGES, f"{block.place}: {block.language} is none of {', '.join(LANGUAGES)}"
            assert block.mark.kind in kinds.get(block.language, {*MARKS, ""}), (
                f"{block.place}: {block.mark.kind} is not for it"
            )
            is_typed = block.language == "sh" or block.mark.kind == "file" or page == MADE
            assert is_typed or not HIDDEN.search(block.text), f"{block.place}: is for sh"
