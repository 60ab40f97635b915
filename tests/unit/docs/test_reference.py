"""What the documents say is so: commands and recipes load, links lead somewhere, named tests exist."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
import typer
import typer.core

from paceline.cli.submit_words import read_words
from paceline.cli.verbs import app
from paceline.cli.words import split_words
from paceline.cluster.site import load_site
from paceline.lab.rungs import load_ladder
from paceline.recipe.load import load

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PLACEHOLDER = re.compile(r"<\w+>")
SHELL = (">", "|", "&&", ";")
VERBS = typer.main.get_group(app).commands


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        if language in languages:
            yield text


def commands() -> Iterator[tuple[str, list[str], bool]]:
    """Yield (page, words after `paceline`, whether a <placeholder> is among them) of every command in a code block."""
    for page in PAGES:
        for text in blocks(page, "sh", "console"):
            for line in text.replace("\\\n", " ").splitlines():
                words = shlex.split(PLACEHOLDER.sub("runs/a", line), comments=True)
                if "paceline" in words:
                    words = list(takewhile(lambda word: word not in SHELL, words[words.index("paceline") + 1 :]))
                    yield page.name, words, PLACEHOLDER.search(line) is not None


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_recipe_page_is_what_the_schema_says() -> None:
    place = ROOT / "docs" / "reference" / "make_recipe.py"
    spec = importlib.util.spec_from_file_location("make_recipe", place)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run .venv/bin/python docs/reference/make_recipe.py"


def test_every_command_in_the_documents_would_run() -> None:
    seen = set()
    for page, (verb, *words), has_placeholder in commands():
        if verb.startswith("-"):
            continue
        command = VERBS[verb]
        if isinstance(command, typer.core.TyperGroup):
            command, words = command.commands[words[0]], words[1:]
        context = command.make_context(f"{page}: {verb}", list(words))
        seen.add(verb)
        if has_placeholder:  # it names a run, which is not here
            continue
        recipe = context.params.get("words", context.params.get("overrides")) or []
        if verb == "submit":
            asked = read_words(recipe)
            load_site(context.params["site"], asked.site, None)
            verb, recipe = asked.verb, list(asked.words)
            context = VERBS[verb].make_context(f"{page}: {verb}", [*asked.words, *asked.options])
        if verb == "data":  # it takes files and folders as well, which are not here
            recipe = [word for word in recipe if "=" in word or not set("./") & set(word)]
        if verb == "ladder":  # its first word is a ladder, whose recipe the others are for
            name, *recipe = recipe or ["auto"]
            recipe = [context.params["recipe"] or load_ladder(name).recipe, *recipe]
        load(*split_words(recipe))
    assert {"train", "recipes", "submit", "data", "doctor", "ladder", "scale", "tune", "compare", "report"} <= seen


def test_every_recipe_in_the_documents_loads(tmp_path: Path) -> None:
    found = [text for page in PAGES for text in blocks(page, "yaml")]
    assert found
    for text in found:
        if "apiVersion:" in text:  # what Kubernetes reads is checked against its types, with what writes it
            continue
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        if re.search(r"^(slurm|kubernetes):", text, re.MULTILINE):
            load_site(str(path), (), None)
        else:
            (load_ladder if "\nrungs:" in text else load)(str(path))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"", prose(page)):
        path, _, anchor = "".join(link).partition("#")
        if path.startswith(("https:", "mailto:")):
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {path} does not exist"
        assert not anchor or anchor in anchors(target), f"{page.name}: {path}#{anchor} is no heading"


def test_every_test_that_a_document_names_exists() -> None:
    defined = {
        name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    files = {file.name for file in (ROOT / "tests").rglob("test_*.py")}
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert named
    assert named <= defined
    assert {name for page in PAGES for name in re.findall(r"`\S*?(test_\w+\.py)`", page.read_text())} <= files
