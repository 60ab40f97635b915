"""Recipes in the documents load, and the pages of recipe fields are the schema's. Commands and links: tests/docs."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from paceline.cluster.site import load_site
from paceline.lab.ladder_file import load_ladder
from paceline.lab.learn import read_space
from paceline.lab.script_ladder_file import load_script_ladder
from paceline.recipe.load import load

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        if language in languages:
            yield text


def test_the_pages_of_recipe_fields_are_generated_from_the_schema() -> None:
    place = ROOT / "docs" / "reference" / "make_recipe.py"
    spec = importlib.util.spec_from_file_location("make_recipe", place)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = {path.name: path.read_text() for path in module.FOLDER.glob("*.md")}
    assert written == module.pages(), "run .venv/bin/python docs/reference/make_recipe.py"
    anchors = {f"{name}#{anchor}" for name, text in written.items() for anchor in re.findall(r'<a id="([^"]+)">', text)}
    assert {
        "train.md#train.ema.decay",
        "optim.md#optim.sgd.momentum",
        "data-augment.md#data.augment.mixup.alpha",
    } <= anchors


def test_every_recipe_in_the_documents_loads(tmp_path: Path) -> None:
    # Those of the tutorial extend one another: they are trained, by tests/docs/test_tutorial.py.
    found = [text for page in PAGES if page.parent.name != "tutorial" for text in blocks(page, "yaml")]
    assert found
    for text in found:
        if "apiVersion:" in text:  # what Kubernetes reads is checked against its types, with what writes it
            continue
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        if re.search(r"^(slurm|kubernetes):", text, re.MULTILINE):
            load_site(str(path), (), None)
        elif re.search(r"^\S+: \{(low|values):", text, re.MULTILINE):
            read_space(path, load("digits").recipe)
        else:
            is_ladder, has_recipe = "\nrungs:" in text, re.search(r"^recipe:", text, re.MULTILINE)
            (load if not is_ladder else load_ladder if has_recipe else load_script_ladder)(str(path))
