"""Code that a file names: no verb imports it without --trust-code, and a folder of images names none."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from paceline.cli.app import app
from paceline.cli.data_source import read_source
from paceline.cli.options import RecipesOptions
from paceline.cli.recipes import recipes
from paceline.core.errors import RecipeError
from paceline.core.run_dir import RunDir
from paceline.lab.ladder_file import load_ladder
from paceline.recipe.load import Patch, load
from paceline.recipe.schema.source import Folder
from paceline.report.read_run import RunData
from paceline.report.run_page import run_status

MADE = Path(__file__).parents[1] / "report" / "compare" / "made.py"
NAMES = """\
model: {name: "leaving:Net"}
data:
  source: {name: "leaving:Data"}
  augment: [flip, "leaving:Change"]
optim: {name: "leaving:Optim", lr: 0.1}
log: {sinks: ["leaving:Sink"]}
train: {epochs: 1}
"""
LADDER = """\
recipe: digits
rungs:
  - name: first
  - name: mine
    set: {model.name: "leaving:Net"}
"""
VERBS = {
    "train": ("train", "r.yaml"),
    "train --dry-run": ("train", "r.yaml", "--dry-run"),
    "train --ranks": ("train", "r.yaml", "--ranks", "2"),
    "train --resume": ("train", "run", "--resume"),
    "train --run-dir": ("train", "--run-dir", "run", "--resume"),
    "profile": ("profile", "r.yaml"),
    "ladder": ("ladder", "cpu", "recipe=r.yaml"),
    "ladder --task": ("ladder", "cpu", "recipe=r.yaml", "--task", "1", "--run-dir", "x"),
    "ladder FILE": ("ladder", "l.yaml"),
    "scale": ("scale", "r.yaml", "--ranks", "1"),
    "tune": ("tune", "r.yaml"),
    "probe": ("probe", "r.yaml"),
    "probe RUN": ("probe", "run"),
    "doctor": ("doctor", "r.yaml"),
    "doctor RUN": ("doctor", "run"),
    "data inspect": ("data", "inspect", "r.yaml"),
    "data inspect RUN": ("data", "inspect", "run"),
    "data inspect --held-out": ("data", "inspect", "r.yaml", "--held-out"),
    "data verify": ("data", "verify", "r.yaml"),
    "data pack": ("data", "pack", "r.yaml", "x.pack"),
    "data stage": ("data", "stage", "r.yaml", "x"),
    "data bench": ("data", "bench", "r.yaml"),
    "eval": ("eval", "run"),
    "predict": ("predict", "run", "a.png"),
    "export": ("export", "run", "--out", "x.onnx"),
    "submit": ("submit", "r.yaml", "--engine", "slurm", "--dry-run"),
    "submit eval": ("submit", "eval", "run", "--engine", "slurm", "--dry-run"),
    "submit ladder": ("submit", "ladder", "l.yaml", "--engine", "slurm", "--dry-run"),
    "submit tune": ("submit", "tune", "r.yaml", "--engine", "slurm", "--dry-run"),
}


@pytest.fixture
def left(tmp_path, monkeypatch):
    """Return the file that importing `leaving` writes; in the current folder `r.yaml`, `l.yaml` and `run` name it."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "here").mkdir()
    file = tmp_path / "left"
    (tmp_path / "modules" / "leaving.py").write_text(f"open({str(file)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    Path("r.yaml").write_text(NAMES)
    Path("l.yaml").write_text(LADDER)
    spec = importlib.util.spec_from_file_location("made", MADE)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    made.write(Path("run"), made.Made())
    Path("run", "recipe.yaml").write_text(NAMES)
    yield file
    sys.modules.pop("leaving", None)


def verb(*words: str) -> int:
    code = app(list(words), standalone_mode=False)
    return code if isinstance(code, int) else 0


def photos(folder: Path, recipe: str) -> Path:
    """Make a folder of images in which a `recipe.yaml` lies."""
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for index in range(20):
            Image.new("RGB", (8, 8), (index, 9, 9)).save(folder / name / f"{index}.png")
    (folder / "recipe.yaml").write_text(recipe)
    return folder


@pytest.mark.parametrize("name", VERBS)
def test_no_verb_imports_code_that_a_file_names_without_trust_code(left, name) -> None:
    before = sorted(Path().rglob("*"))
    with pytest.raises(RecipeError) as caught:
        verb(*VERBS[name])
    message = str(caught.value)
    assert "leaving:" in message and "is custom code" in message and "(add --trust-code" in message
    assert message.startswith(("r.yaml:", "run/recipe.yaml:", "l.yaml: rung 'mine':"))
    assert not left.exists() and "leaving" not in sys.modules and sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("name", ["train --dry-run", "data inspect", "data verify"])
def test_with_trust_code_it_is_imported(left, name) -> None:
    with pytest.raises(RecipeError, match=r"leaving has no (Net|Data)"):
        verb(*VERBS[name], "--trust-code")
    assert left.exists()


def test_verbs_that_only_read_never_import_it(left, capsys) -> None:
    recipes(RecipesOptions(args=["r.yaml"], origin=True))
    recipes(RecipesOptions(args=["run"], as_json=True))
    for form in ("html", "md", "json"):
        verb("report", "run", "--format", form)
    verb("compare", "run", "run")
    assert "leaving:Net" in capsys.readouterr().out
    assert not left.exists() and "leaving" not in sys.modules


def test_overrides_need_no_flag(left, capsys) -> None:
    with pytest.raises(RecipeError, match="leaving has no Net"):
        verb("train", "digits", "model.name=leaving:Net", "--dry-run")
    assert left.exists()


def test_a_frozen_recipe_carries_the_consent_of_the_command_line_into_its_job(left, capsys) -> None:
    options = ("--engine", "slurm", "--dry-run")
    for words in (
        ("train", "digits", "model.name=leaving:Net", *options),
        ("train", "r.yaml", *options, "--trust-code"),
        ("train", "r.yaml", *options, "--", "--trust-code"),
        ("tune", "r.yaml", *options, "--trust-code"),
        ("scale", "r.yaml", "--array", *options, "--trust-code", "--", "--ranks", "1"),
        ("ladder", "l.yaml", *options, "--trust-code"),
        ("ladder", "l.yaml", "--array", *options, "--trust-code"),
        ("eval", "run", *options, "--trust-code"),
    ):
        assert verb("submit", *words) == 0
        scripts = capsys.readouterr().out.split("#!/bin/bash")[1:]
        assert scripts and all(script.count(" --trust-code") == 1 for script in scripts), words
    assert verb("submit", "digits", *options) == 0
    assert "--trust-code" not in capsys.readouterr().out
    assert not left.exists()


def test_the_resume_hint_has_the_flag_if_the_run_names_code(left) -> None:
    result = RunDir(Path("run")).read_result().model_copy(update={"status": "preempted"})
    named = result.model_copy(update={"provenance": {"own_parts": {"leaving:Net": {}}}})
    texts = [run_status(RunData(Path("a b"), result=each))[0] for each in (named, result)]
    assert texts[0].endswith("resume with paceline train 'a b' --resume --trust-code")
    assert texts[1].endswith("resume with paceline train 'a b' --resume")


def test_a_rung_on_the_command_line_is_no_files(left) -> None:
    assert load_ladder("l.yaml").rungs[1].patch.values() == {"model": {"name": "leaving:Net"}}
    with pytest.raises(RecipeError, match="has no effect on a list"):
        verb("ladder", "l.yaml", "--list", "--task", "1")


@pytest.mark.parametrize("recipe", [NAMES, "extends: digits\n", "nonsense: [\n"])
def test_a_folder_of_images_is_data_whatever_recipe_lies_in_it(left, capsys, recipe) -> None:
    photos(Path("photos"), recipe)
    request = read_source("photos", [])
    assert not request.is_recipe and request.source == Folder(root="photos")
    assert verb("data", "inspect", "photos", "--json") == 0
    assert json.loads(capsys.readouterr().out)["source"]["root"] == "photos"
    assert verb("data", "verify", "photos") == 0
    assert verb("data", "pack", "photos", "x.pack", "--workers", "1") == 0
    assert verb("data", "stage", "photos", "staged") == 0
    for words in (("train", "photos"), ("train", "photos", "--dry-run"), ("doctor", "photos"), ("tune", "photos")):
        with pytest.raises(RecipeError, match=r"photos: has a recipe.yaml.*photos/recipe.yaml; images: .*root=photos"):
            verb(*words)
    for words in (
        ("predict", "photos", "a.png"),
        ("eval", "photos"),
        ("submit", "eval", "photos", "--engine", "slurm"),
    ):
        with pytest.raises(RecipeError, match=r"photos: is not a run directory \(it has no plan.json"):
            verb(*words)
    assert not left.exists() and "leaving" not in sys.modules


def test_origins_are_printed_without_control_characters(left, capsys) -> None:
    clears = r"\e[2J\e[1;1Hmodel.name: resnet18_cifar   # default\e]0;owned\a"
    Path("e.yaml").write_text(f'extends: digits\nmodel: {{name: "leaving:Net", weights: "{clears}"}}\n')
    for words in (("e.yaml", "--origin"), ("e.yaml",), ("e.yaml", "--json")):
        verb("recipes", *words)
        printed = capsys.readouterr().out
        assert "leaving:Net" in printed and all(line.isprintable() for line in printed.splitlines()), words


def test_rungs_are_printed_without_control_characters(left, capsys) -> None:
    Path("e.yaml").write_text('recipe: digits\nrungs:\n  - {name: a, explains: "\\e[2Jhidden", set: {seed: 1}}\n')
    verb("ladder", "e.yaml", "--list")
    printed = capsys.readouterr().out
    assert "hidden" in printed and all(line.isprintable() for line in printed.splitlines())


@pytest.mark.parametrize("field", ["metrics: [leaving:cost]", "monitor: leaving:cost"])
def test_an_evaluation_needs_consent_to_metrics_in_a_job_too(left, field: str) -> None:
    from paceline.recipe.yaml import to_yaml_text

    name, _, value = field.partition(": ")
    recipe = load("digits", Patch.parse([f"train.{name}={value}"])).recipe
    Path("run/recipe.yaml").write_text(to_yaml_text(recipe.to_dict()))
    for words in (("eval", "run"), ("submit", "eval", "run", "--engine", "slurm", "--dry-run")):
        with pytest.raises(RecipeError, match="leaving:cost is custom code"):
            verb(*words)
    assert not left.exists()
