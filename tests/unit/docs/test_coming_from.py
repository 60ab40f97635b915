"""What the pages for those who come from elsewhere name is there: fields, recipes, ladders, verbs and their options."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.core
from typer.main import get_group

from paceline.cli.app import app
from paceline.lab.ladder_file import load_ladder
from paceline.recipe.load import load
from paceline.recipe.schema import Recipe

FOLDER = Path(__file__).parents[3] / "docs"
PAGES = sorted(
    [
        *(FOLDER / "coming-from").glob("*.md"),
        *(FOLDER / "explanation" / f"{name}.md" for name in ("data-parallelism", "exposed-communication")),
        FOLDER / "explanation" / "learning-rate-and-batch.md",
        FOLDER / "explanation" / "evaluation.md",
    ]
)
SECTIONS = "data|model|optim|schedule|train|parallel|checkpoint|measure|log"
FIELD = re.compile(rf"(?<![\w./-])((?:{SECTIONS})(?:\.(?!py\b|safetensors\b)[a-z_0-9]+)+)(?=[=\s`,:)]|$)")
"""A dotted path from a section, and no file's name."""
PRESET = re.compile(r"(?<![\w/])((?:sc20|course|ddp-post|jsc|quant)/[\w-]+)")


def spans(page: Path) -> Iterator[str]:
    """Yield what stands between backticks in the text of a page, and its commands, continued lines joined."""
    text = page.read_text()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()


def fields(node: dict[str, Any], schema: dict[str, Any], above: str = "") -> Iterator[str]:
    """Yield the dotted path of every field, of all variants."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    for variant in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from fields(variant, schema, above)
    for name, below in node.get("properties", {}).items():
        yield f"{above}{name}"
        yield from fields(below, schema, f"{above}{name}.")


@pytest.fixture(scope="module")
def known() -> set[str]:
    schema = Recipe.model_json_schema()
    return set(fields(schema, schema))


def test_every_page_of_the_index_exists() -> None:
    index = (FOLDER / "coming-from" / "README.md").read_text()
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert linked == {page.name for page in (FOLDER / "coming-from").glob("*.md")} - {"README.md"}
    assert len(linked) == 9


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_field_that_a_page_names_is_one_of_a_recipe(page: Path, known: set[str]) -> None:
    named = {name for text in spans(page) for name in FIELD.findall(text)}
    assert named or page.stem == "evaluation"
    assert named - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_recipe_that_a_page_names_loads(page: Path) -> None:
    for name in {name for text in spans(page) for name in PRESET.findall(text)}:
        load(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_verb_ladder_and_option_in_the_text_exists(page: Path) -> None:
    verbs = get_group(app).commands
    for text in spans(page):
        if not text.startswith("paceline "):
            continue
        verb, *args = text.split()[1:]
        command: Any = verbs[verb]
        if isinstance(command, typer.core.TyperGroup):
            command = command.commands[args[0]]
        options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        used = {word.partition("=")[0] for word in args if word.startswith("--")}
        assert used <= options or verb == "submit", f"{text}: {used - options}"
        if verb == "ladder":
            load_ladder(args[0])


def test_an_unknown_field_would_be_found(known: set[str]) -> None:
    assert FIELD.findall("optim.lr=0.1 optim.learning_rate=1 timm.optim:Lion train.py model.safetensors") == [
        "optim.lr",
        "optim.learning_rate",
    ]
    assert {"optim.lr", "data.source.root", "train.ema.decay", "train.stop.top1"} <= known
    assert "optim.learning_rate" not in known
