"""The tour and the glossary name files and functions that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src/paceline"
TOUR = (ROOT / "docs/project/tour.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs/help/glossary.md").read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    """Return the cells of all rows of tables, without headings."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| file ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def files_of(cell: str) -> list[str]:
    return [each for each in re.findall(r"`([^`]+)`", cell) if each.endswith(".py")]


def names_in(path: Path) -> set[str]:
    """Return the names of classes and functions of a file, and the qualified names of methods."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


def test_the_tour_names_functions_that_exist() -> None:
    checked = 0
    for cells in rows(TOUR):
        files = files_of(cells[0])
        known = set().union(*(names_in(SOURCE / file) for file in files)) if files else set()
        for name in re.findall(r"`([^`]+)`", cells[1]) if files else ():
            assert name in known, f"{cells[0]}: {name}"
            checked += 1
    assert checked > 150


@pytest.mark.parametrize(
    ("heading", "walk"),
    [
        ("### In the worker process", "one batch, in a worker process"),
        ("### On the rank", "one training step, on a rank"),
        ("### On the main thread", "one checkpoint, on rank 0"),
        ("### In the writer's thread", "writing it, in the writer's thread"),
        ("## Follow one command", "`paceline train`, from the command line to the first loss"),
    ],
)
def test_the_tour_counts_its_files(heading: str, walk: str) -> None:
    level = heading.partition(" ")[0]
    section = re.split(rf"^#{{2,{len(level)}}} ", TOUR.split(f"\n{heading}\n")[1], flags=re.MULTILINE)[0]
    files = [file for cells in rows(section) for file in files_of(cells[0])]
    counts = {cells[0]: cells[1] for cells in rows(TOUR) if len(cells) == 2}
    assert len(files) == len(set(files))
    assert str(len(files)) == counts[walk]


def test_the_glossary_names_files_that_exist() -> None:
    paths = [each for each in re.findall(r"`([a-z_]+/[a-z_./]*)`", GLOSSARY) if not each.startswith("tests/")]
    assert len(paths) > 30
    for path in paths:
        assert (SOURCE / path).exists(), path
