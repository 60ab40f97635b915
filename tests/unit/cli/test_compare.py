"""`paceline compare`: what it prints and writes, its exit codes, and what it refuses."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from paceline.cli.compare import compare
from paceline.cli.options import CompareOptions
from paceline.core.errors import PacelineError, RecipeError

MADE = Path(__file__).parents[1] / "report" / "compare" / "made.py"


@pytest.fixture(scope="module")
def made():
    spec = importlib.util.spec_from_file_location("made", MADE)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def runs(made, tmp_path_factory):
    """Return a run, and one with a batch of 2048 and warm-up that takes 0.125 of its time."""
    root = tmp_path_factory.mktemp("runs")
    return [
        made.write(root / "small", made.Made()),
        made.write(root / "large", made.Made(batch=2048, warmup="16ep", epoch_s=2.5)),
    ]


def work(runs, *, target=None, metric="top1", fail_below=(), out=None, as_json=False):
    return compare(
        CompareOptions(
            runs=list(runs), target=target, metric=metric, fail_below=list(fail_below), out=out, as_json=as_json
        )
    )


def test_tables_and_the_statement_are_printed(runs, capsys):
    assert work(runs, target=0.75) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Reaching 75 %" in printed and "8.00x" in printed and "schedule.warmup" in printed
    assert "Batch 2048 with warm-up reaches 75 % in 0.125 of the time of batch 128" in printed


def test_every_run_is_listed_by_its_directory_with_its_group_and_accuracies(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    named = [(0.1, 0, 0.7), (0.1, 1, 0.72), (0.5, 0, 0.01)]
    paths = [Path(f"lr{lr}-s{seed}") for lr, seed, _ in named]
    for path, (lr, seed, best) in zip(paths, named, strict=True):
        made.write(path, made.Made(lr=lr, seed=seed, best=best))
    assert work(paths) == 0
    printed = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("lr0.1-s0 1 completed 0 70.00 % 70.00 % 0.3000") for line in printed)
    assert any(line.startswith("lr0.1-s1 1 completed 1 72.00 % 72.00 % 0.2800") for line in printed)
    assert any(line.startswith("lr0.5-s0 2 completed 0 1.00 % 1.00 % 0.9900") for line in printed)
    assert "Reaching 70 % (the highest that all runs that learned reach)" in printed
    assert "Top-1 at the end, the highest first" in printed


def test_the_most_accurate_is_first_unless_all_reach_the_target(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    paths = [
        made.write(tmp_path / f"b{batch}", made.Made(batch=batch, best=best)) for batch, best in ((1, 0.1), (2, 0.8))
    ]
    assert work(paths) == 0
    printed = capsys.readouterr().out
    lines = [line.split()[2:4] for line in printed.splitlines() if re.match(r"│ \d: batch", line)]
    assert lines == [["batch", "2"], ["batch", "1"]] * 2


def test_json_is_the_only_output_on_stdout(runs, capsys, tmp_path):
    assert work(runs, as_json=True, out=tmp_path / "c.html") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["kind"] == "compare" and printed["groups"][1]["speedup"]["value"] == pytest.approx(8)  # rounding
    assert [run["path"] for each in printed["groups"] for run in each["runs"]] == list(map(str, runs))


@pytest.mark.parametrize("suffix, begins", [(".html", "<!doctype html>"), (".md", "# 2 runs compared"), (".json", "{")])
def test_the_suffix_of_out_is_the_format(runs, tmp_path, capsys, suffix, begins):
    out = tmp_path / f"c{suffix}"
    assert work(runs, out=out) == 0
    assert out.read_text().startswith(begins) and f"comparison: {out}" in capsys.readouterr().out


def test_a_group_below_a_level_fails_and_is_named(runs, capsys):
    assert work(runs, fail_below=["8.5"]) == 1
    assert "speedup is 8x of batch 128, 0.5x below the minimum of 8.5x" in capsys.readouterr().err
    assert work(runs, fail_below=["7.9", "top1=0.8", "gap=0"]) == 0
    assert capsys.readouterr().err == ""
    assert work(runs[::-1], fail_below=["speedup=1"], as_json=True) == 1
    assert "speedup is 0.125x" in json.loads(capsys.readouterr().out)["failures"][0]


def test_runs_with_several_labels_are_compared_by_average_precision(runs, tmp_path, capsys):
    copies = [tmp_path / run.name for run in runs]
    for run, copy in zip(runs, copies, strict=True):
        shutil.copytree(run, copy)
        evals = copy / "evals.jsonl"
        evals.write_text(evals.read_text().replace("top1", "ap"))
    for folders, metric in ((copies, "ap"), (runs, "top1"), ([runs[0], copies[1]], "top1")):
        assert work(folders, metric="auto", as_json=True) == 0
        assert json.loads(capsys.readouterr().out)["metric"] == metric


def test_a_run_that_is_named_twice_counts_once(runs, capsys):
    assert work([*runs, runs[0] / "."], as_json=True) == 0
    assert [len(each["runs"]) for each in json.loads(capsys.readouterr().out)["groups"]] == [1, 1]


def test_a_single_run_is_reported(runs, capsys):
    assert work(runs[:1]) == 0
    assert "There is nothing to compare" in capsys.readouterr().out
    with pytest.raises(RecipeError, match=r"^--fail-below: there is nothing to compare with"):
        work(runs[:1], fail_below=["1"])


@pytest.mark.parametrize(
    "options, printed",
    [
        ({"metric": "aurocs"}, r"^--metric: 'aurocs' is not a metric \(did you mean 'auroc'\?\)$"),
        (
            {"metric": "loss"},
            r"^--metric: loss is better if it is lower, .*\(use one of top1, top5, mean_class_accuracy, ",
        ),
        ({"metric": "f1"}, r"^--metric: no run has values of f1 .*\(use top1, .* train with train.metrics=\[f1\]\)$"),
        ({"out": Path("c.pdf")}, r"^--out: c.pdf has no known format \(name a file ending in .html, .md, .json\)$"),
        ({"target": 75}, r"^--target: 75 is not an accuracy"),
        ({"fail_below": ["x"]}, r"^--fail-below: 'x' has no number"),
    ],
)
def test_invalid_options_are_refused(runs, options, printed):
    with pytest.raises(RecipeError, match=printed):
        work(runs, **options)


def test_runs_of_several_labels_have_no_top1_and_cannot_train_with_it(runs, tmp_path):
    copies = [shutil.copytree(run, tmp_path / run.name) for run in runs]
    for copy in copies:
        evals = copy / "evals.jsonl"
        evals.write_text(evals.read_text().replace('"top1"', '"ap"').replace('"top5"', '"f1"'))
    with pytest.raises(RecipeError, match=r"^--metric: no run has values of top1 .*\(use .*f1, ap\)$"):
        work(copies)


@pytest.mark.parametrize("begun", [True, False])
def test_an_experiment_is_no_run_and_its_runs_are_named(runs, tmp_path, begun):
    """It has a recipe as runs have, so that it would be taken for one that has not finished."""
    (tmp_path / "recipe.yaml").write_text((runs[0] / "recipe.yaml").read_text())
    if begun:
        (tmp_path / "trials").mkdir()
    else:
        (tmp_path / "experiment.json").write_text("{}")
    with pytest.raises(PacelineError, match=rf"is an experiment \(name its runs: {tmp_path}/trials/\*\)$"):
        work([runs[0], tmp_path])


def test_no_runs_and_no_place_to_write_are_refused(runs, tmp_path):
    with pytest.raises(RecipeError, match=r"^compare: no run was named"):
        work([])
    with pytest.raises(PacelineError, match=r"^--out: \S+ cannot be written: No such file or directory"):
        work(runs, out=tmp_path / "no" / "c.html")
