"""Every feature of the five documents has a command, a test, or an explanation of its absence.

`docs/coming-from/rows.csv` has a row for each feature that a document describes or has its readers type.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from paceline.recipe.yaml import read_yaml_file

from .commands import ROOT, Command, read_commands
from .understood import load_recipe, parse

FOLDER = ROOT / "docs" / "coming-from"
COLUMNS = ["document", "id", "row", "state", "command", "test", "difference"]
DOCUMENTS = {
    "nersc-sc20": ("N", 62),
    "ddp-course": ("C", 51),
    "dataparallel-post": ("P", 29),
    "jsc": ("J", 36),
    "acceleration-study": ("Q", 39),
}
"""Pages, with the letter of the ids and the number of the rows of each."""
LEAST = 205
OTHERS = ("python", "tensorboard", "cut", "docker")
"""Programs of commands without `paceline`."""
A_RUN = re.compile(r"runs/[\w./-]+")


@cache
def rows() -> list[dict[str, str]]:
    with (FOLDER / "rows.csv").open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        found = [*reader]
        assert reader.fieldnames == COLUMNS
    return found


def commands() -> Iterator[tuple[str, Command]]:
    """Yield every command with the id of its row."""
    for row in rows():
        yield from ((row["id"], command) for command in read_commands(row["command"]))


def test_every_feature_of_every_document_has_one_row() -> None:
    ids = [(row["document"], row["id"]) for row in rows()]
    wanted = [
        (name, f"{letter}{number:02}") for name, (letter, last) in DOCUMENTS.items() for number in range(1, last + 1)
    ]
    assert ids == wanted
    assert len(ids) == 217
    assert all(row["row"] for row in rows())


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_row_has_a_command_a_test_or_an_explanation(name: str) -> None:
    for row in rows():
        if row["document"] != name:
            continue
        match row["state"]:
            case "yes":
                assert row["command"] or row["test"], f"{row['id']}: neither a command nor a test shows it"
            case "not here":
                assert row["difference"], f"{row['id']}: why is it not here?"
                assert not row["command"], f"{row['id']}: is not here, and has a command"
            case other:
                pytest.fail(f"{row['id']}: {other!r} is no state")


def test_at_least_205_features_exist() -> None:
    assert Counter(row["state"] for row in rows())["yes"] >= LEAST


def test_every_command_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its verbs, options, recipes, ladders, sites, fields and values exist."""
    monkeypatch.setattr(
        "paceline.recipe.load.read_yaml_file", cache(read_yaml_file)
    )  # some 30 files, each of them many times
    verbs, recipes = set(), 0
    for row, command in commands():
        if command.paceline is None:
            assert command.program in OTHERS, f"{row}: {command.program} is not known"
            continue
        verb, *words = command.paceline
        parse(f"{row}: {verb}", verb, words)
        verbs.add(verb)
        if not any(map(A_RUN.match, words[:1])):
            recipes += load_recipe(command.paceline)
    assert {"train", "profile", "ladder", "scale", "compare", "submit"} <= verbs
    assert recipes > 150


def test_every_file_named_by_a_command_exists() -> None:
    named = {word for _, command in commands() for word in command.words if re.match(r"(?:examples|benchmarks)/", word)}
    assert len(named) >= 4
    assert {name for name in named if not (ROOT / name).is_file()} == set()


def test_every_named_test_exists() -> None:
    named = {row["test"] for row in rows() if row["test"]}
    assert len(named) > 60
    for test in named:
        path, _, name = test.partition("::")
        assert re.search(rf"^ *def {name}\(", source(path), re.MULTILINE), f"{test} does not exist"


@cache
def source(path: str) -> str:
    return Path(ROOT, path).read_text(encoding="utf-8")


def test_pages_have_the_correct_numbers_of_rows() -> None:
    page = (FOLDER / "the-five-documents.md").read_text(encoding="utf-8")
    stated = re.findall(r"^\| \[[^\]]+\]\(([\w-]+)\.md\) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    counts = Counter((row["document"], row["state"]) for row in rows())
    assert [(name, *map(int, numbers)) for name, *numbers in stated] == [
        (name, counts[name, "yes"] + counts[name, "not here"], counts[name, "yes"], counts[name, "not here"])
        for name in DOCUMENTS
    ]
    states = Counter(row["state"] for row in rows())
    assert f"{len(rows())} rows, {states['yes']} of them yes and {states['not here']} not here" in page
