"""Runs with different plugin code: the code of a plugin is a setting of the run."""

import json

import pytest

from paceline.report.compare_model import read_compared_run
from paceline.report.compare_page import build_compare_page
from paceline.report.compare_runs import compare_runs
from paceline.report.render import render_html

NET = "nets:Mixer"
OLD, NEW = {"file": "/home/me/nets.py", "sha256": "1a2b3c4d" + "0" * 56}, {"sha256": "9f8e7d6c" + "0" * 56}


def run(made, folder, code, **fields):
    """Write a run that has recorded this code of its network."""
    return made.write(folder, made.Made(own_parts={NET: code}, **fields))


def test_runs_of_other_code_are_a_group_named_after_it(made, compared, tmp_path):
    paths = [run(made, tmp_path / f"s{seed}", code, seed=seed) for seed, code in enumerate((OLD, OLD, NEW))]
    found = compared(*paths)
    assert [(each.name, len(each.runs)) for each in found.groups] == [
        (f"code.{NET}=1a2b3c4d", 2),
        (f"code.{NET}=9f8e7d6c", 1),
    ]
    assert found.groups[1].settings == {f"code.{NET}": "9f8e7d6c"}


def test_a_file_that_is_the_same_may_be_of_another_package(made, compared, tmp_path):
    paths = [run(made, tmp_path / f"s{minor}", {**OLD, "package": f"nets 1.{minor}"}, seed=minor) for minor in (0, 1)]
    assert [each.settings[f"code.{NET}"] for each in compared(*paths).groups] == [
        "1a2b3c4d, nets 1.0",
        "1a2b3c4d, nets 1.1",
    ]


def test_plugins_whose_long_names_share_a_prefix_are_two(made, compared, tmp_path):
    one, two = (f"nets:{'M' * 200}{end}" for end in "12")
    before = made.write(tmp_path / "a", made.Made(own_parts={one: OLD, two: NEW}))
    after = made.write(tmp_path / "b", made.Made(own_parts={one: NEW, two: NEW}))
    assert len(compared(before, after).groups[0].settings) == 1


@pytest.mark.parametrize(
    "code", [{**OLD, "file": "/elsewhere/nets.py"}, {**OLD, "note": 7}], ids=["a moved file", "another key"]
)
def test_the_same_code_is_one_group(made, compared, tmp_path, code):
    paths = [run(made, tmp_path / f"s{seed}", each, seed=seed) for seed, each in enumerate((OLD, code))]
    assert len(compared(*paths).groups) == 1


@pytest.mark.parametrize("code", ["x", {"sha256": 7}, {"sha256": ""}, {}], ids=str)
def test_an_invalid_record_of_code_is_ignored(made, compared, tmp_path, code):
    paths = [run(made, tmp_path / "s0", code), made.write(tmp_path / "s1", made.Made(seed=1))]
    assert len(compared(*paths).groups) == 1


def test_the_code_of_an_unfinished_run_is_read_from_its_newest_checkpoint(made, compared, tmp_path):
    paths = [run(made, tmp_path / "a", OLD), run(made, tmp_path / "b", None, status="unfinished")]
    for step, code in ((8, OLD), (16, NEW)):
        folder = paths[1] / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"own_parts": {NET: code}}))
    assert compared(*paths).groups[1].name == f"code.{NET}=9f8e7d6c"


def test_the_page_names_plugin_code_and_escapes_it(made, tmp_path, without_own_scripts):
    evil = "<script>alert(1)</script>:Net"
    paths = [made.write(tmp_path / name, made.Made(own_parts={evil: code})) for name, code in (("a", OLD), ("b", NEW))]
    runs = [read_compared_run(path, "top1") for path in paths]
    text = without_own_scripts(render_html(build_compare_page(compare_runs(runs), runs)))
    assert "9f8e7d6c" in text and "<script" not in text and "alert(1)" in text
