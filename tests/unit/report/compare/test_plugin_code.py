"""Runs with different plugin code: notes of a comparison, and its page."""

import json

import pytest

from paceline.report.compare_model import read_compared_run
from paceline.report.compare_page import build_compare_page
from paceline.report.compare_runs import compare_runs
from paceline.report.render import render_html

NET = "nets:Mixer"
OLD, NEW = {"file": "/home/me/nets.py", "sha256": "1a2b3c4d" + "0" * 56}, {"sha256": "9f8e7d6c" + "0" * 56}


def run(made, folder, code, **fields):
    """Write a run that has recorded this code of its network, or of the parts by their names."""
    parts = code if code is None or NET in code else {NET: code}
    return made.write(folder, made.Made(own_parts=parts, **fields))


def test_repeats_with_different_code_are_named(made, compared, tmp_path):
    paths = [run(made, tmp_path / f"s{seed}", code, seed=seed) for seed, code in enumerate((OLD, OLD, NEW))]
    (text,) = compared(*paths).notes
    assert text == (
        "s0: its runs differ in code, not only in the seed: "
        "nets:Mixer (sha256 1a2b3c4d in s0, s1; sha256 9f8e7d6c in s2)."
    )


def test_groups_with_different_code_are_named(made, compared, tmp_path):
    paths = [run(made, tmp_path / "a", OLD), run(made, tmp_path / "b", NEW, batch=64)]
    (text,) = compared(*paths).notes
    assert text == (
        "batch 64 uses other code than batch 128, which may explain differences: "
        "nets:Mixer (sha256 9f8e7d6c against sha256 1a2b3c4d)."
    )


def test_a_change_of_code_between_groups_is_named(made, compared, tmp_path):
    """Their recipes are equal, so only this note distinguishes them."""
    paths = [run(made, tmp_path / "before", OLD), run(made, tmp_path / "after", NEW)]
    (text,) = compared(*paths).notes
    assert text.startswith("after uses other code than before, ")


def test_code_that_differs_only_at_the_end_of_a_long_version_is_other_code(made, compared, tmp_path):
    paths = [run(made, tmp_path / end, {**OLD, "package": "nets 1." + "0" * 200 + end}) for end in "12"]
    (text,) = compared(*paths).notes
    assert text.startswith("2 uses other code than 1, ") and len(text) < 300


def test_plugins_whose_long_names_share_a_prefix_are_two(made, compared, tmp_path):
    one, two = (f"nets:{'M' * 200}{end}" for end in "12")
    before = made.write(tmp_path / "a", made.Made(own_parts={one: OLD, two: NEW}))
    after = made.write(tmp_path / "b", made.Made(own_parts={one: NEW, two: NEW}))
    (text,) = compared(before, after).notes
    assert text.startswith("b uses other code than a, ") and text.count("nets:MMM") == 1


def test_a_file_that_is_the_same_may_be_of_another_package(made, compared, tmp_path):
    versions = [{**OLD, "package": f"nets 1.{minor}"} for minor in range(2)]
    paths = [run(made, tmp_path / name, code) for name, code in zip("ab", versions, strict=True)]
    assert "nets:Mixer (nets 1.1 against nets 1.0)" in compared(*paths).notes[0]
    paths = [run(made, tmp_path / f"s{seed}", code, seed=seed) for seed, code in enumerate(versions)]
    assert "nets:Mixer (nets 1.0 in s0; nets 1.1 in s1)" in compared(*paths).notes[0]


@pytest.mark.parametrize(
    "codes",
    [
        (OLD, {**OLD, "file": "/elsewhere/nets.py"}),
        (OLD, None),
        (OLD, {}),
        (OLD, {NET: "x"}),
        (OLD, {NET: {"sha256": 7, "package": ""}}),
        (OLD, {**OLD, "package": "nets 1.0"}),
    ],
    ids=["a moved file", "no record", "no file", "no object", "no text", "installed or not"],
)
def test_same_and_unknown_code_give_no_note(made, compared, tmp_path, codes):
    groups = [run(made, tmp_path / "groups" / name, code) for name, code in zip("ab", codes, strict=True)]
    repeats = [
        run(made, tmp_path / "repeats" / name, code, seed=ord(name)) for name, code in zip("ab", codes, strict=True)
    ]
    assert len(compared(*groups).groups) == 2 and compared(*groups).notes == ()
    assert len(compared(*repeats).groups) == 1 and compared(*repeats).notes == ()


def test_groups_that_share_a_version_of_the_code_give_no_note(made, compared, tmp_path):
    first = [run(made, tmp_path / f"a{seed}", code, seed=seed) for seed, code in enumerate((OLD, NEW))]
    second = [run(made, tmp_path / f"b{seed}", NEW, seed=seed, batch=64) for seed in range(2)]
    (text,) = compared(*first, *second).notes
    assert text.startswith("batch 128: its runs differ in code")


def test_the_code_of_an_unfinished_run_is_read_from_its_newest_checkpoint(made, compared, tmp_path):
    paths = [run(made, tmp_path / "a", OLD), run(made, tmp_path / "b", None, status="unfinished")]
    for step, code in ((8, OLD), (16, NEW)):
        folder = paths[1] / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"own_parts": {NET: code}}))
    assert compared(*paths).notes[0].startswith("b uses other code than a, ")


def test_the_page_names_plugin_code_and_escapes_it(made, tmp_path):
    evil = "<script>alert(1)</script>:Net"
    paths = [made.write(tmp_path / name, made.Made(own_parts={evil: code})) for name, code in (("a", OLD), ("b", NEW))]
    runs = [read_compared_run(path, "top1") for path in paths]
    text = render_html(build_compare_page(compare_runs(runs), runs))
    assert "b uses other code than a" in text and "sha256 9f8e7d6c" in text
    assert "<script" not in text and "alert(1)" in text


def test_of_many_parts_and_runs_a_few_are_named(made, compared, tmp_path):
    parts = [{f"nets:Part{number}": code for number in range(7)} for code in (OLD, NEW)]
    paths = [made.write(tmp_path / f"s{seed}", made.Made(seed=seed, own_parts=parts[seed > 7])) for seed in range(9)]
    (text,) = compared(*paths).notes
    assert "in s0, s1, s2, s3, s4 and 3 more; " in text and text.endswith(
        "nets:Part4 (sha256 1a2b3c4d in s0, s1, s2, s3, s4 and 3 more; sha256 9f8e7d6c in s8) and 2 more."
    )
