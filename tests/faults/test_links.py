"""A run directory, pack or folder from elsewhere: no verb writes, deletes or blocks outside it."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

ARGS = ("digits", "model.name=empty", "model.width=1.0", "log.tensorboard=off", "measure.telemetry=off")
THESIS = "line one\nno newline at the end"


@pytest.fixture(scope="module")
def completed_run(paceline_in, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A completed run to copy."""
    folder = tmp_path_factory.mktemp("links")
    completed = paceline_in(folder)("train", *ARGS, "train.epochs=2", "checkpoint.every=1ep", "--run-dir", "run")
    assert completed.code == 0, completed.err
    return folder / "run"


@pytest.fixture
def foreign_run(completed_run: Path, tmp_path: Path) -> Path:
    """A copy of the run as another user might have sent it, not completed."""
    (tmp_path / "thesis.txt").write_text(THESIS)
    run = tmp_path / "stranger"
    shutil.copytree(completed_run, run)
    (run / "result.json").unlink()
    return run


def test_a_report_does_not_follow_links_out_of_the_run(paceline, foreign_run, tmp_path) -> None:
    (foreign_run / ".report.html.tmp").symlink_to(tmp_path / "thesis.txt")
    assert paceline("report", "stranger").code == 0
    assert (tmp_path / "thesis.txt").read_text() == THESIS and (foreign_run / "report.html").is_file()


# One process for all links: each is refused or replaced, and none is followed.
def test_resuming_does_not_follow_links_out_of_the_run(paceline, foreign_run, tmp_path) -> None:
    names = (".plan.json.tmp", ".recipe.yaml.tmp", ".metrics.csv.tmp", ".probe", "plan.json", "metrics.csv")
    for name in names:
        (foreign_run / name).unlink(missing_ok=True)
        (foreign_run / name).symlink_to(tmp_path / "thesis.txt")
    completed = paceline("train", "stranger", "--run-dir", "stranger", "--resume")
    assert completed.code == 0, completed.err
    assert (tmp_path / "thesis.txt").read_text() == THESIS
    (foreign_run / "result.json").unlink()
    (foreign_run / ".lock").unlink(missing_ok=True)
    (foreign_run / ".lock").symlink_to(tmp_path / "thesis.txt")
    paceline("train", "stranger", "--run-dir", "stranger", "--resume").assert_error(
        "stranger", ".lock is a link", "(name"
    )
    assert (tmp_path / "thesis.txt").read_text() == THESIS


def test_a_linked_checkpoint_folder_is_not_shared(paceline, foreign_run, tmp_path) -> None:
    before = sorted(path.name for path in (foreign_run / "checkpoints").iterdir())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoints").symlink_to(foreign_run / "checkpoints")
    args = ("train", *ARGS, "train.epochs=4", "seed=2", "checkpoint.every=1ep", "checkpoint.keep=1")
    paceline(*args, "--run-dir", "other").assert_error("other/checkpoints is a link", "--run-dir")
    assert sorted(path.name for path in (foreign_run / "checkpoints").iterdir()) == before


def test_pipes_in_a_run_do_not_block(paceline, foreign_run, completed_run, tmp_path) -> None:
    shutil.copytree(completed_run / "worst", tmp_path / "images") if (completed_run / "worst").is_dir() else None
    (tmp_path / "images").mkdir(exist_ok=True)
    os.mkfifo(foreign_run / "result.json")
    resumed = paceline.start("train", "stranger", "--run-dir", "stranger", "--resume")
    _, err = resumed.communicate(timeout=60)
    assert resumed.returncode == 0, err  # an unreadable result counts as missing
    for name in ("dataset.json",):
        (foreign_run / name).unlink()
        os.mkfifo(foreign_run / name)
    process = paceline.start("predict", "stranger", "images")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "dataset.json is a pipe" in err and "Traceback" not in err
    for name in ("steps.jsonl", "attempts.jsonl"):
        kept = (foreign_run / name).read_bytes()
        (foreign_run / name).unlink()
        os.mkfifo(foreign_run / name)
        (foreign_run / "result.json").unlink(missing_ok=True)
        process = paceline.start("train", "stranger", "--run-dir", "stranger", "--resume")
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2 and f"{name} is a pipe" in err and "Traceback" not in err, err
        (foreign_run / name).unlink()
        (foreign_run / name).write_bytes(kept)


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


def test_a_removed_run_directory_is_reported_and_not_recreated(paceline, tmp_path) -> None:
    process = paceline.start("train", *ARGS, "train.epochs=5000", "checkpoint.every=1ep", "--run-dir", "run")
    try:
        deadline_s = time.monotonic() + 60
        while not list((tmp_path / "run").glob("checkpoints/step-*")):
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.02)
        while (tmp_path / "run").exists():  # the run may write to the folder during its removal
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    last = err.splitlines()[-1]
    assert process.returncode == 4 and last.startswith("error: run: was removed while the run was training"), err
    assert "--resume" not in last and "Traceback" not in err
    assert not (tmp_path / "run").exists()
