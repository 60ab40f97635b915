"""Incomplete run directories: the report names missing and damaged files, and shows the rest."""

import html
import json
import math
import shutil

import pytest

from paceline.core.errors import PacelineError
from paceline.core.results import EvalResult
from paceline.core.run_dir import RunDir
from paceline.report.read_run import read_run
from paceline.report.time_sections import logged_stage_seconds
from paceline.report.write import render_report, write_report

NOTES = {
    "result.json": "The run has not finished: start-up, evaluations and checkpoints are attributed at its end",
    "recipe.yaml": "Plan (plan.json)",
    "plan.json": "Recipe, resolved (recipe.yaml)",
    "machine.json": "Machine and versions",
    "evals.jsonl": "Nothing was evaluated: train.eval_every is off",
    "steps.jsonl": "No step was logged: the run was shorter than log.every",
    "classes.csv": "What it gets wrong",
    "confusion.csv": "There is no confusion matrix",
    "calibration.csv": "What it gets wrong",
    "attempts.jsonl": "paused training for",
    "warnings.jsonl": "Reliability",
    "bad_images.jsonl": "Reliability",
    "telemetry.node0.jsonl": "The machine was not recorded: the run ended before the first sample",
    "worst/worst.json": "No misclassified image was saved",
    "profile.json": "without data loading",
}
DAMAGES = (b"", b"\xff\xfe\x00", b"{", b"[1, 2", b"null", b"7", b'"x"', b"[[[]]]\n{}\n[]\n", b"[" * 9999)


@pytest.fixture(scope="module")
def whole(runs, tmp_path_factory):
    return runs.write_run(tmp_path_factory.mktemp("runs") / "whole", runs.SMALL)


@pytest.fixture
def rundir(whole, tmp_path):
    """Return a whole run, to be damaged."""
    return RunDir(shutil.copytree(whole.path, tmp_path / "run"))


@pytest.mark.parametrize("name", sorted(NOTES))
def test_a_missing_file_is_named_and_the_rest_is_shown(rundir, name):
    (rundir.path / name).unlink()
    text = render_report(rundir, "md")
    assert (NOTES[name] in text) != (name == "profile.json")
    assert "could not be read:" not in text
    assert text.count("\n## ") >= 6


def test_a_page_of_the_required_files_alone_is_written(rundir):
    for name in NOTES:
        if name != "recipe.yaml":
            (rundir.path / name).unlink()
    text = write_report(rundir).read_text()
    assert NOTES["result.json"] in text and NOTES["evals.jsonl"] in text


@pytest.mark.parametrize("name", sorted(NOTES))
def test_a_damaged_file_is_no_error(rundir, name):
    for content in DAMAGES:
        (rundir.path / name).write_bytes(content)
        assert render_report(rundir, "md").startswith("# run") and json.loads(render_report(rundir, "json"))


@pytest.mark.parametrize("content", DAMAGES)
def test_a_folder_of_damaged_files_is_no_error(rundir, content):
    for name in NOTES:
        (rundir.path / name).write_bytes(content)
    assert "not finished" in write_report(rundir).read_text()


def test_a_killed_run_shows_how_far_it_came(rundir):
    (rundir.path / "result.json").unlink()
    with rundir.steps.open("a") as file:
        file.write('{"step": 4000, "lo')
    text = write_report(rundir).read_text()
    assert "not finished" in text and "last logged step" in text and "top-1 so far" in text


def test_an_unfinished_run_shows_where_its_time_went_so_far(rundir):
    (rundir.path / "result.json").unlink()
    shares = {"data_wait_share": 0.25, "forward_share": 0.5, "exposed_communication_share": 0.125, "evil<b>_share": 9.0}
    rows = [
        {"step": 10, "images_seen": 1000, "images_per_s": 100.0},  # in the measurement warm-up: no shares
        {"step": 20, "images_seen": 2000, "images_per_s": 100.0, **shares},
        {"step": 30, "images_seen": 4000, "images_per_s": 50.0, "data_wait_share": 0.5, "forward_share": 0.25},
    ]
    rundir.steps.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    seconds = logged_stage_seconds(read_run(rundir))
    assert seconds == {"data_wait": 22.5, "forward": 15.0, "exposed_communication": 1.25, "residual": 11.25}
    text = render_report(rundir, "md")
    assert "| data wait so far | 45.0 % | of rank 0's step time |" in text
    assert "| exposed communication | 2.5 % | 1.25 s |" in text and "evil" not in text
    assert "| Waiting, data wait | % of step time | 25 | 50 | 25 | 50 |" in text


@pytest.mark.parametrize("rate", [0.0, -1.0, "nan"])
def test_shares_without_a_possible_speed_are_not_shown(rundir, rate):
    (rundir.path / "result.json").unlink()
    row = {"step": 1, "images_seen": 128, "images_per_s": rate, "data_wait_share": -7.0}
    rundir.steps.write_text(f"{json.dumps(row)}\n")
    assert "No logged step has shares of stages yet." in render_report(rundir, "md")


def test_a_run_that_only_began_is_reported(tmp_path):
    (tmp_path / "recipe.yaml").write_text("# recipe 0123456789ab\nseed: 0\n")
    text = write_report(RunDir(tmp_path)).read_text()
    assert "recipe 0123456789ab" in text and "not finished" in text


def test_fields_of_a_newer_version_are_named_and_ignored(rundir):
    path = rundir.path / "result.json"
    values = json.loads(path.read_text())
    values["time"]["asleep_s"] = 3.0
    path.write_text(json.dumps({**values, "mood": "good"}))
    text = write_report(rundir).read_text()
    assert "result.json: unknown to this version and not shown: time.asleep_s, mood" in text
    assert "target reached" in text


def test_an_invalid_result_is_named(rundir):
    (rundir.path / "result.json").write_text('{"status": "completed"}')
    assert "result.json: is not a result: recipe_hash: Field required" in write_report(rundir).read_text()


def test_numbers_that_are_none_are_no_error(runs, tmp_path):
    evaluation = EvalResult(images=3, top1=0.5, top5=1.0, loss=math.inf, ece=math.nan).model_dump()
    changes = {"ema": evaluation, "eval": evaluation, "best": evaluation}
    rundir = runs.write_run(tmp_path / "run", runs.SMALL, **changes)
    row = '{"step": 9, "epoch": NaN, "loss": "inf", "top1": Infinity, "trained_s": 1e999, "lr": true}\n'
    for path in (rundir.steps, rundir.evals, rundir.telemetry(0)):
        path.write_text(row * 3)
    for kind in ("html", "md", "json"):
        text = render_report(rundir, kind)
        assert "nan" in text and "inf" in text
    assert json.loads(text)["result"]["ema"]["loss"] == "inf"


def test_a_run_without_evaluation_reports_it(runs, tmp_path):
    nothing = {"eval": None, "ema": None, "train_eval": None, "best": None, "gap": None}
    rundir = runs.write_run(tmp_path / "run", runs.SMALL, **nothing)
    for name in ("evals.jsonl", "classes.csv", "confusion.csv"):
        (rundir.path / name).unlink()
    assert "not evaluated" in write_report(rundir).read_text()


def test_one_rank_has_no_waiting_time(runs, tmp_path):
    alone = {"world_size": 1, "communication": None, "ranks": (), "straggler": None}
    rundir = runs.write_run(tmp_path / "run", runs.SMALL, **alone)
    assert "Communication and ranks" not in write_report(rundir).read_text()


def test_a_smooth_run_has_no_reliability_section(runs, tmp_path):
    saved = {"saved": 3, "failed": 0, "stall_s": 0.01, "write_s": 0.1, "bytes": 1000}
    rundir = runs.write_run(tmp_path / "run", runs.SMALL, checkpoints=saved, skipped_steps=0, bad_images=0)
    rundir.warnings.unlink()
    rundir.bad_images.unlink()
    assert "## Reliability" in render_report(rundir, "md")  # it was started twice
    runs.write_lines(rundir.attempts, runs.ATTEMPTS[2:])
    assert "## Reliability" not in render_report(rundir, "md")
    rundir.write_result(rundir.read_result().model_copy(update={"skipped_steps": 1}))
    assert "## Reliability" in render_report(rundir, "md")


def test_lateness_without_a_straggler_is_reported(runs, tmp_path):
    lost = {"lost_s": 0.0019, "share": 0.0401, "late_steps": 0.25}
    page = write_report(runs.write_run(tmp_path / "run", runs.SMALL, straggler=lost)).read_text()
    assert "The straggler changes from step to step in 25.0 % of the steps." in page


@pytest.mark.parametrize("every, note", [("off", "measure.telemetry is off"), ("5s", "before the first sample (5s)")])
def test_missing_telemetry_has_its_reason(rundir, every, note):
    rundir.telemetry(0).unlink()
    recipe = rundir.recipe.read_text()
    rundir.recipe.write_text(recipe.replace("telemetry: 3s", f"telemetry: {every}"))
    assert note in write_report(rundir).read_text()


def test_a_run_that_trains_has_not_ended_before_its_first_sample(rundir):
    rundir.telemetry(0).unlink()
    (rundir.path / "result.json").unlink()
    page = write_report(rundir).read_text()
    assert "no sample of the machine yet (3s)" in page and "the run ended" not in page


PSUTIL = "psutil is not installed (pip install 'paceline[telemetry]')"
NVML = "nvidia-ml-py is not installed (pip install 'paceline[telemetry]')"


@pytest.mark.parametrize(
    "provenance, gpus, note",
    [
        ({"telemetry_missing": NVML, "device": "cuda"}, 0, f"No GPU was recorded: {NVML}."),
        ({"device": "cuda"}, 2, "The charts show all GPUs of the node"),
    ],
)
def test_the_telemetry_section_explains_missing_gpu_values(runs, tmp_path, provenance, gpus, note):
    shape = runs.Shape(steps=3, samples=3, mistakes=1, gpus=gpus)
    page = html.unescape(write_report(runs.write_run(tmp_path / "run", shape, provenance=provenance)).read_text())
    assert note in page and "telemetry missing" not in page


def test_a_run_on_cpus_shows_no_empty_rows_of_gpus_captures_or_failures(runs, tmp_path):
    ranks = [
        {"rank": rank, "step_s": 0.01, "late_s": 0.0, "stages": {"forward": 0.004, "captured_step": 0.0}}
        for rank in (0, 1)
    ]
    saved = {"saved": 3, "failed": 0, "stall_s": 0.01, "write_s": 0.1, "bytes": 1000}
    shape = runs.Shape(steps=3, samples=3, mistakes=1, gpus=0)
    provenance = {"device": "cpu"}
    rundir = runs.write_run(tmp_path / "run", shape, provenance=provenance, ranks=ranks, checkpoints=saved)
    text = render_report(rundir, "md")
    assert "| forward |" in text and "3 saved" in text
    for empty in ("captured step", "No GPU", " failed", "by the device's clock"):
        assert empty not in text, empty


def test_a_run_without_psutil_reports_it_once(runs, tmp_path):
    rundir = runs.write_run(tmp_path / "run", runs.SMALL, provenance={"telemetry_missing": PSUTIL})
    rundir.telemetry(0).unlink()
    page = html.unescape(write_report(rundir).read_text())
    assert f"The machine was not recorded: {PSUTIL}." in page
    assert page.count(PSUTIL) == 1


def test_only_pictures_of_the_folder_itself_are_shown(rundir):
    """What is no plain file there, and what only calls itself a picture, could be anything."""
    secret = rundir.path / "secret.png"
    secret.write_bytes(b"\x89PNG\r\n\x1a\nSECRET")
    (rundir.worst / "sub").mkdir()
    (rundir.worst / "sub" / "x.png").write_bytes(secret.read_bytes())
    (rundir.worst / "link.png").symlink_to(secret)
    (rundir.worst / "fake.png").write_text("<svg onload=alert(1)>")
    names = ["../secret.png", str(secret), "", "..", "a\0b", "sub/x.png", "link.png", "fake.png", "x" * 300, 7, None]
    rows = [{"file": name, "true": "a", "predicted": "b", "maps": {"true": name}} for name in [*names, "0.jpg"]]
    rows[-1]["maps"] = ["0.jpg"]
    (rundir.worst / "worst.json").write_text(json.dumps(rows))
    text = write_report(rundir).read_text()
    assert text.count("no thumbnail") == len(names) and text.count("data:image") == 1


def test_an_invalid_run_directory_is_an_error_in_one_line(tmp_path):
    with pytest.raises(PacelineError) as caught:
        write_report(RunDir(tmp_path / "nothing"))
    assert str(caught.value).endswith("nothing: is not a run directory (name one that paceline train has written)")
    assert caught.value.exit_code == 2


def test_a_folder_that_cannot_be_written_to_is_an_os_error(rundir, monkeypatch):
    def refuse(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.report.write.write_atomic", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_report(rundir)


def test_keys_of_a_profile_may_be_missing(rundir):
    found = json.loads(rundir.profile.read_text())
    for key in found:
        rundir.profile.write_text(json.dumps({**found, key: None}))
        assert "What would be faster" in render_report(rundir, "md")
    rundir.profile.write_text(
        json.dumps({"probes": [{}, 7], "ceilings": {"x": "y"}, "cost": {"mfu": None}, "base": []})
    )
    assert "Probes" in write_report(rundir).read_text()
