"""Code that a file names: which verbs never import it, and the line that the others say first."""

import importlib.util
import sys
from pathlib import Path

import pytest

from paceline.cli.compare import compare
from paceline.cli.data_words import read_source
from paceline.cli.dry_run import dry_run
from paceline.cli.recipes import recipes
from paceline.cli.report import report
from paceline.cli.submit import submit
from paceline.core.errors import RecipeError
from paceline.core.world import World
from paceline.recipe.load import load, load_values
from paceline.recipe.patch import Patch
from paceline.train.code_note import tell_code

MADE = Path(__file__).parents[1] / "report" / "compare" / "made.py"
NAMES = """
model: {name: "leaving:Net"}
data:
  source: {name: "leaving:Data"}
  augment: [flip, "leaving:Change"]
optim: {name: "leaving:Optim", lr: 0.1}
log: {sinks: ["leaving:Sink"]}
train: {epochs: 1}
"""
NOTE = "note: runs code that {} names: leaving:Net, leaving:Data, leaving:Optim, leaving:Change, leaving:Sink\n"


@pytest.fixture
def left(tmp_path, monkeypatch):
    """Return the file that importing `leaving` writes; a folder with `r.yaml`, which names it, is the current one."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "here").mkdir()
    file = tmp_path / "left"
    says = "import sys\nprint('imported', file=sys.stderr)\n"
    (tmp_path / "modules" / "leaving.py").write_text(f"{says}open({str(file)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    Path("r.yaml").write_text(NAMES)
    yield file
    sys.modules.pop("leaving", None)


@pytest.fixture
def run(left, tmp_path) -> Path:
    """Return the directory of a run of such a recipe."""
    spec = importlib.util.spec_from_file_location("made", MADE)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    path = made.write(tmp_path / "run", made.Made())
    (path / "recipe.yaml").write_text(NAMES)
    return path


def submitted(*words: str) -> int:
    none = dict.fromkeys(("ranks_per_node", "site", "run_dir"))
    plain = {"nodes": 1, "gpus_per_node": 0, "array": False, "wait": False, "dry_run": True, "as_json": False}
    return submit(list(words), engine="slurm", **none, **plain)


def test_verbs_that_only_look_never_import_what_a_recipe_names(left, run, capsys) -> None:
    recipes(["r.yaml"], origin=True, schema=False, as_json=False)
    recipes([str(run)], origin=False, schema=False, as_json=True)
    recipes([], origin=False, schema=True, as_json=False)
    assert submitted("r.yaml") == 0
    assert submitted("eval", str(run)) == 0
    for form in ("html", "md", "json"):
        report(run, form, None, as_json=False)
    compare([run, run], target=None, metric="top1", fail_below=[], out=None, as_json=False)
    said = capsys.readouterr()
    assert not left.exists() and "leaving" not in sys.modules
    assert "runs code" not in said.err and "leaving:Net" in said.out


def test_who_runs_it_says_so_first(left, capsys) -> None:
    with pytest.raises(RecipeError, match="leaving has no Net"):
        dry_run(load("r.yaml"), World(), 1, as_json=True)
    said = capsys.readouterr()
    assert left.exists() and said.out == ""
    assert said.err == NOTE.format("r.yaml") + "imported\n"


def test_a_run_directory_is_named_as_the_file_it_is(run, capsys) -> None:
    tell_code(load(str(run)))
    assert capsys.readouterr().err == NOTE.format(run / "recipe.yaml")


def test_each_file_is_told_with_the_code_that_it_names(left, capsys) -> None:
    Path("above.yaml").write_text("extends: r.yaml\noptim: {name: 'mine:Optim', lr: 0.1}\n")
    tell_code(load("above.yaml", Patch.parse(["model.name=mine:Net", "log.sinks=[]"])))
    assert capsys.readouterr().err.splitlines() == [
        "note: runs code that r.yaml names: leaving:Data, leaving:Change",
        "note: runs code that above.yaml names: mine:Optim",
    ]


def test_what_the_words_or_a_script_name_is_their_own(left, capsys) -> None:
    tell_code(load("digits", Patch.parse(["model.name=leaving:Net"])))
    tell_code(load_values({"extends": "digits", "model": {"name": "leaving:Net"}}))
    tell_code(load("digits"))
    assert capsys.readouterr().err == ""
    tell_code(load_values({"extends": "r.yaml"}))
    assert capsys.readouterr().err == NOTE.format("r.yaml")


def test_the_data_verbs_tell_of_what_they_run(left, capsys) -> None:
    read_source("r.yaml", [])
    assert capsys.readouterr().err == "note: runs code that r.yaml names: leaving:Data, leaving:Change\n"
    assert not left.exists()


def test_a_name_that_a_terminal_would_obey_is_escaped(left, capsys) -> None:
    Path("a\x1b[2J.yaml").write_text(NAMES)
    tell_code(load("a\x1b[2J.yaml"))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said[:-1].isprintable()


def test_a_run_tells_of_its_code_before_it_begins(forking, left, tmp_path) -> None:
    process = forking.start(
        ["-m", "paceline", "train", "r.yaml", "--json"], Path.cwd(), {"PYTHONPATH": str(tmp_path / "modules")}
    )
    out, err = process.communicate()
    assert process.returncode == 2 and out == ""
    note, imported, error = err.splitlines()
    assert (f"{note}\n", imported) == (NOTE.format("r.yaml"), "imported")
    assert error == "error: model.name: leaving:Net: leaving has no Net (correct it)"
