"""Malicious recipes are refused in one line, and names with special characters are printed and written safely."""

import csv
import json
import time
from pathlib import Path

import pytest
from PIL import Image

from paceline.core.csv_cells import from_cell
from paceline.core.errors import RecipeError
from paceline.data.files import printable
from paceline.recipe.load import load
from paceline.recipe.yaml import read_yaml_text

TRAIN = "train: {epochs: 1}\n"
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
BAD = {
    "a tag that calls": ("seed: !!python/object/apply:os.system [touch canary]\n", "r.yaml:1: tag ", "not allowed"),
    "aliases without end": (BOMB, "r.yaml:1: ", "anchors and aliases are not allowed"),
    "a key said twice": (f"{TRAIN}seed: 1\nseed: 2\n", "r.yaml:3:1: ", 'duplicate key "seed"'),
    "a key said twice below": ("train:\n  epochs: 1\n  epochs: 2\n", "r.yaml:3:3: ", 'duplicate key "epochs"'),
    "an unknown key": (
        f"{TRAIN}optim:\n  learning_rate: 1\n",
        "r.yaml:3: optim.learning_rate: ",
        "(did you mean 'optim.lr'?)",
    ),
    "a misspelled key": (
        f"{TRAIN}optim: {{momentun: 0.9}}\n",
        "r.yaml:2: optim.momentun: ",
        "did you mean 'optim.momentum'?",
    ),
    "an unknown section": (f"{TRAIN}model_name: x\n", "r.yaml:2: model_name: ", "("),
    "text for a number": (f"{TRAIN}data:\n  batch_size: many\n", "r.yaml:3: data.batch_size: ", "'many'"),
    "a list for a section": (f"{TRAIN}data: [1]\n", "r.yaml:2: data: ", "("),
    "a number for a word": (f"{TRAIN}model: {{norm: 3}}\n", "r.yaml:2: model.norm: 3", "batch"),
    "a variant that is none": (f"{TRAIN}optim: {{name: sdg}}\n", "r.yaml:2: optim.name: ", "did you mean 'sgd'?"),
    "less than nothing": ("train: {epochs: -1}\n", "r.yaml:1: train.epochs: ", "-1"),
    "no number": (f"{TRAIN}optim: {{lr: .nan}}\n", "r.yaml:2: optim.lr: ", "nan"),
}


# matrix: 44
@pytest.mark.parametrize(("text", "place", "problem"), BAD.values(), ids=BAD)
def test_a_malicious_or_invalid_recipe_is_refused_with_its_line(
    tmp_path: Path, monkeypatch, text: str, place: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(text)
    started = time.monotonic()
    with pytest.raises(RecipeError) as refused:
        load("r.yaml")
    assert time.monotonic() - started < 1
    message = str(refused.value)
    assert message.startswith(place) and problem in message, message
    assert len(message.splitlines()) == 1 and message.isprintable()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.yaml"]


# matrix: 44
def test_the_program_reports_a_malicious_recipe_and_writes_nothing(paceline, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(BAD["a tag that calls"][0])
    paceline("train", "r.yaml", "--run-dir", "run").assert_error("r.yaml:1: tag ")
    paceline("train", "seed=!!python/object/apply:os.system [touch canary]").assert_error("seed:1: tag ")
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


# matrix: 44
def test_scalars_are_parsed_as_in_yaml_1_2(resolve) -> None:
    """YAML 1.1 parses `1e-3` as text, `010` as eight and `on` as true."""
    assert resolve("optim: {lr: 1e-3}").optim.lr == 1e-3
    assert resolve("train: {epochs: 010}").train.epochs == 10
    assert resolve("measure: {clock: on}").measure.clock == "on"
    assert read_yaml_text("optim: {lr: 1E-3}", "r.yaml").values == {"optim": {"lr": 1e-3}}


@pytest.fixture
def resolve(tmp_path: Path):
    def recipe(text: str):
        (tmp_path / "r.yaml").write_text(text if text.startswith("train") else TRAIN + text)
        return load(str(tmp_path / "r.yaml")).recipe

    return recipe


CLASSES = (
    "$(touch canary)",
    "; touch canary;",
    "`touch canary`",
    "| touch canary #",
    "-rf",
    "--run-dir=canary",
    "<script>touch('canary')",
    '"><img onerror=canary>',
    "two\nlines",
    "a\rreturn",
    "\x1b[2J\x1b]0;canary\x07",
    "comma, and 'quotes' \"both\"",
    "=cmd|'touch canary'!A1",
    "[red]canary",
    "%(canary)s {canary} %n",
    " edges ",
    "naïve ☃ \u202egnirts",
)
# Characters that cannot be printed on a line are escaped when a name is read, in memory as in every file.
PRINTED = [printable(name) for name in CLASSES]


@pytest.fixture(scope="module")
def malicious(ranks_in, tmp_path_factory):
    """A run on images of classes with malicious names: its folder, its output and that of an evaluation."""
    folder = tmp_path_factory.mktemp("evil")
    for label, name in enumerate(CLASSES):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(2):
            shade = (label * 15, number * 99, 40)
            Image.new("RGB", (16, 16), shade).save(folder / "photos" / name / f"{name[:1]}$(touch canary){number}.png")
    source = ("data.source.name=folder", "data.source.root=photos", "data.image_size=16", "data.batch_size=4")
    args = ("train", *source, "train.steps=2", "model.width=0.1", "parallel.threads=1", "data.workers=0")
    start = ranks_in(folder)
    trained = start(*args, "--run-dir", "run")
    assert trained.codes == [0], trained.errors
    table, evaluated = start("eval", "run", "--classes"), start("eval", "run", "--classes", "--json")
    return folder, trained, table, evaluated


# matrix: 45
def test_class_names_are_not_executed(malicious) -> None:
    folder, *_ = malicious
    assert not [path for path in folder.rglob("*") if path.name == "canary"]


# matrix: 45
def test_class_names_are_the_same_in_tables_json_and_output(malicious) -> None:
    folder, _, _, evaluated = malicious
    with (folder / "run" / "classes.csv").open(newline="") as file:
        rows = list(csv.reader(file, strict=True))
    assert sorted(from_cell(row[0]) for row in rows[1:]) == sorted(PRINTED)
    assert all(row[0].isprintable() and not row[0].startswith(("=", "+", "-", "@")) for row in rows[1:])
    assert {len(row) for row in rows} == {7} and len(set(PRINTED)) == len(CLASSES)
    with (folder / "run" / "confusion.csv").open(newline="") as file:
        square = list(csv.reader(file, strict=True))
    assert {len(row) for row in square} == {len(CLASSES) + 1} and len(square) == len(CLASSES) + 1
    assert sorted(each["class"] for each in json.loads(evaluated.out)["classes"]) == sorted(PRINTED)


# matrix: 45
def test_class_names_contain_no_control_characters_in_output(malicious) -> None:
    _, trained, table, _ = malicious
    for output in (trained.out, table.out, *trained.errors, *table.errors):
        assert not [character for character in output if not character.isprintable() and character != "\n"]
    assert r"two\nlines" in table.out and r"\x1b[2J" in table.out and r"\u202e" in table.out
    assert "[red]canary" in table.out  # rich did not interpret it as markup


# matrix: 45
def test_a_bad_image_with_a_malicious_name_is_reported_in_one_line(ranks, tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in ("a", "$(touch canary)\n\x1b[2J"):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for number in range(4):
                path = tmp_path / "photos" / split / name / f"-{number}.png"
                Image.new("RGB", (16, 16)).save(path) if split == "val" or name == "a" else path.write_bytes(b"<html>")
    source = ("data.source.name=folder", "data.source.root=photos", "data.image_size=16", "data.batch_size=4")
    completed = ranks("train", *source, "train.epochs=1", "model.width=0.1", "parallel.threads=1", "--run-dir", "run")
    errors = [line for line in completed.errors[0].splitlines() if line.startswith("error: ")]
    assert completed.codes[0] != 0 and len(errors) == 1 and errors[0].isprintable()
    assert r"$(touch canary)\n\x1b[2J/-" in errors[0]
    assert not list(tmp_path.rglob("canary"))


# matrix: 45
def test_a_recipe_and_a_run_may_have_special_characters_in_their_names(ranks, tmp_path: Path) -> None:
    name = "-rf $(touch canary); `touch canary` <script> naïve"
    (tmp_path / f"{name}.yaml").write_text("extends: digits\ntrain: {steps: 1}\nmodel: {width: 0.1}\n")
    quick = ("data.batch_size=12", "parallel.threads=1", "log.tensorboard=off", "--json")
    trained = ranks("train", *quick[3:], "--", f"./{name}.yaml", *quick[:3])
    assert trained.codes == [0], trained.errors
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith(f"{name}-20")
    evaluated = ranks("eval", "--json", "--", str(run.relative_to(tmp_path)))
    assert json.loads(evaluated.out)["images"] == 359
    assert not list(tmp_path.rglob("canary"))


# matrix: 45
def test_a_run_directory_with_unprintable_characters_is_printed_escaped(ranks) -> None:
    name = "two\nlines\rand\x1b[2J"
    args = ("train", "model.width=0.1", "train.steps=1", "data.batch_size=12", "parallel.threads=1")
    completed = ranks(*args, "log.tensorboard=off", "--run-dir", name)
    output = completed.out + "".join(completed.errors)
    assert not [character for character in output if not character.isprintable() and character != "\n"]
    if completed.codes == [0]:
        again = ranks(*args, "log.tensorboard=off", "--run-dir", name)
        assert again.codes == [2] and len(again.errors[0].splitlines()) == 1
    else:
        assert completed.codes == [2] and len(output.splitlines()) == 1
