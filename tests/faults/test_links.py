"""A run directory, a pack or a folder that somebody else has prepared: no verb writes, deletes or waits outside it."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

ARGS = ("digits", "model.name=empty", "model.width=1.0", "log.tensorboard=off", "measure.telemetry=off")
THESIS = "line one\nno newline at the end"


@pytest.fixture(scope="module")
def trained(paceline_in, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, to copy."""
    folder = tmp_path_factory.mktemp("links")
    completed = paceline_in(folder)("train", *ARGS, "train.epochs=2", "checkpoint.every=1ep", "--run-dir", "run")
    assert completed.code == 0, completed.err
    return folder / "run"


@pytest.fixture
def stranger(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, as somebody has sent it, that has not ended."""
    (tmp_path / "thesis.txt").write_text(THESIS)
    run = tmp_path / "stranger"
    shutil.copytree(trained, run)
    (run / "result.json").unlink()
    return run


def test_a_report_follows_no_link_out_of_the_run(paceline, stranger, tmp_path) -> None:
    (stranger / ".report.html.tmp").symlink_to(tmp_path / "thesis.txt")
    assert paceline("report", "stranger").code == 0
    assert (tmp_path / "thesis.txt").read_text() == THESIS and (stranger / "report.html").is_file()


# One process for all: each is refused or replaced, and none leads out.
def test_resuming_follows_no_link_out_of_the_run(paceline, stranger, tmp_path) -> None:
    names = (".plan.json.tmp", ".recipe.yaml.tmp", ".metrics.csv.tmp", ".probe", "plan.json", "metrics.csv")
    for name in names:
        (stranger / name).unlink(missing_ok=True)
        (stranger / name).symlink_to(tmp_path / "thesis.txt")
    completed = paceline("train", "stranger", "--run-dir", "stranger", "--resume")
    assert completed.code == 0, completed.err
    assert (tmp_path / "thesis.txt").read_text() == THESIS
    (stranger / "result.json").unlink()
    (stranger / ".lock").unlink(missing_ok=True)
    (stranger / ".lock").symlink_to(tmp_path / "thesis.txt")
    paceline("train", "stranger", "--run-dir", "stranger", "--resume").assert_error(
        "stranger", ".lock is a link", "(name"
    )
    assert (tmp_path / "thesis.txt").read_text() == THESIS


def test_two_runs_do_not_share_checkpoints_by_a_link(paceline, stranger, tmp_path) -> None:
    before = sorted(path.name for path in (stranger / "checkpoints").iterdir())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoints").symlink_to(stranger / "checkpoints")
    args = ("train", *ARGS, "train.epochs=4", "seed=2", "checkpoint.every=1ep", "checkpoint.keep=1")
    paceline(*args, "--run-dir", "other").assert_error("other/checkpoints is a link", "--run-dir")
    assert sorted(path.name for path in (stranger / "checkpoints").iterdir()) == before


def test_pipes_in_a_run_are_not_waited_for(paceline, stranger, trained, tmp_path) -> None:
    shutil.copytree(trained / "worst", tmp_path / "images") if (trained / "worst").is_dir() else None
    (tmp_path / "images").mkdir(exist_ok=True)
    os.mkfifo(stranger / "result.json")
    resumed = paceline.start("train", "stranger", "--run-dir", "stranger", "--resume")
    _, err = resumed.communicate(timeout=60)
    assert resumed.returncode == 0, err  # a result that cannot be read is none
    for name in ("dataset.json",):
        (stranger / name).unlink()
        os.mkfifo(stranger / name)
    process = paceline.start("predict", "stranger", "images")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "dataset.json is a pipe" in err and "Traceback" not in err
    for name in ("steps.jsonl", "attempts.jsonl"):
        kept = (stranger / name).read_bytes()
        (stranger / name).unlink()
        os.mkfifo(stranger / name)
        (stranger / "result.json").unlink(missing_ok=True)
        process = paceline.start("train", "stranger", "--run-dir", "stranger", "--resume")
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2 and f"{name} is a pipe" in err and "Traceback" not in err, err
        (stranger / name).unlink()
        (stranger / name).write_bytes(kept)


def test_manifests_that_are_pipes_or_devices_are_refused(paceline, tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    (tmp_path / "zero.pkl").symlink_to("/dev/zero")
    for name, kind in (("pipe.csv", "a pipe"), ("zero.csv", "a device"), ("zero.pkl", "a device")):
        source = {"source": {"name": "manifest", "train": name, "val": name}}
        (tmp_path / "r.yaml").write_text(json.dumps({"extends": "digits", "data": source}))
        process = paceline.start("data", "inspect", "r.yaml")
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2 and f"{name} is {kind}" in err and len(err.splitlines()) == 1, err


def test_a_run_whose_folder_is_removed_reports_it_and_creates_none(paceline, tmp_path) -> None:
    process = paceline.start("train", *ARGS, "train.epochs=5000", "checkpoint.every=1ep", "--run-dir", "run")
    try:
        deadline_s = time.monotonic() + 60
        while not list((tmp_path / "run").glob("checkpoints/step-*")):
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.02)
        while (tmp_path / "run").exists():  # it may be written to while it is removed
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    last = err.splitlines()[-1]
    assert process.returncode == 4 and last.startswith("error: run: was removed while the run was training"), err
    assert "--resume" not in last and "Traceback" not in err
    assert not (tmp_path / "run").exists()
