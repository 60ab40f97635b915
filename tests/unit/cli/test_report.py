"""`paceline report`: where it writes, what it prints, and what it refuses."""

import json
import os
from pathlib import Path

import pytest

from paceline.cli.options import ReportOptions
from paceline.cli.report import report
from paceline.core.errors import PacelineError, RecipeError


@pytest.fixture
def run(tmp_path):
    (tmp_path / "recipe.yaml").write_text("# recipe 0123456789ab\nseed: 0\n")
    return tmp_path


def test_html_goes_into_the_run_directory(run, capsys):
    assert report(ReportOptions(run=run)) == 0
    assert capsys.readouterr().out == f"report: {run / 'report.html'}\n"
    assert (run / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("is_link", [False, True])
def test_a_pipe_in_place_of_the_report_is_replaced_and_not_waited_for(run, tmp_path_factory, is_link):
    pipe = tmp_path_factory.mktemp("elsewhere") / "pipe" if is_link else run / "report.html"
    os.mkfifo(pipe)
    if is_link:
        (run / "report.html").symlink_to(pipe)
    kept_open = os.open(pipe, os.O_RDWR)  # a writer does not wait for a reader, so that this test can fail
    try:
        assert report(ReportOptions(run=run)) == 0
    finally:
        os.close(kept_open)
    written = run / "report.html"
    assert written.is_file() and not written.is_symlink() and written.read_text().startswith("<!doctype html>")


def test_markdown_and_json_go_to_stdout_and_nothing_else_does(run, capsys):
    assert report(ReportOptions(run=run, format="md")) == 0
    assert capsys.readouterr().out.startswith(f"# {run.name}\n")
    assert report(ReportOptions(run=run, format="json", as_json=True)) == 0
    assert json.loads(capsys.readouterr().out)["name"] == run.name
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("kind", ["html", "md", "json"])
def test_out_names_the_file(run, tmp_path, capsys, kind):
    path = tmp_path / "elsewhere"
    assert report(ReportOptions(run=run, format=kind, out=path, as_json=True)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"path": str(path), "format": kind, "bytes": path.stat().st_size}
    assert not (run / "report.html").exists()


def test_a_watched_script_is_not_followed(tmp_path):
    (tmp_path / "watch").mkdir()
    with pytest.raises(RecipeError, match=r"^--follow: .* is a watched script.*\(leave --follow out"):
        report(ReportOptions(run=tmp_path, follow=True))


def test_markdown_and_json_cannot_both_be_on_stdout(run):
    with pytest.raises(RecipeError, match=r"^--json: Markdown goes to stdout too \(add --out PATH"):
        report(ReportOptions(run=run, format="md", as_json=True))


def test_a_path_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(PacelineError, match=r"is not a run directory \(name one that paceline train has written\)$"):
        report(ReportOptions(run=tmp_path / "none"))


def test_a_place_that_cannot_be_written_to_is_refused(run):
    with pytest.raises(PacelineError, match=r"^--out: \S+ cannot be written: No such file or directory"):
        report(ReportOptions(run=run, out=Path("/nowhere/at/all/report.html")))
