"""`paceline submit` trains on two nodes of a real Slurm what two local ranks train, and reports the result."""

import json
import os
from pathlib import Path

import pytest

STEPS = "train.steps=12"


@pytest.fixture(scope="module")
def data(fashion: Path) -> tuple[Path, int]:
    """Return Fashion-MNIST if it is present, else synthetic data in its place, and the number of validation images."""
    real = Path(os.environ.get("PACELINE_TEST_DATA", os.devnull), "fashion-mnist")
    return (real, 10_000) if real.is_dir() else (fashion, 24)


def test_two_nodes_train_the_same_as_two_local_ranks(
    slurm, data, uninterrupted, assert_same_run, tmp_path: Path
) -> None:
    root, num_images = data
    args = ("course/wideresnet-fashion", "model.width=0.05", f"data.source.root={root}", "data.batch_size=24", STEPS)
    args = (*args, "log.samples=true", "log.tensorboard=off", "log.report=off", "data.workers=0")
    args = (*args, "parallel.threads=1", "measure.communication=on")
    before = {name: slurm.machines.received_bytes(name) for name in ("node01", "node02")}
    options = ("--engine", "slurm", "--nodes", "2", "--run-dir", "run", "--wait", "--json")
    completed = slurm.paceline("submit", *args, *options, folder=tmp_path)
    assert completed.returncode == 0, (completed.stdout, completed.stderr)
    assert slurm.facts(json.loads(completed.stdout)["job_id"])["NodeList"] == "node[01-02]"

    run = tmp_path / "run"
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["world_size"]) == ("completed", 2)
    assert result["eval"]["images"] == num_images
    assert result["provenance"]["launcher"] == "slurm"
    # Two ranks send each byte of the gradients once: half for the reduction, and half of the sums. Ranks on one node
    # would send none of it through the switch.
    num_bytes = 12 * result["communication"]["bytes"]
    assert all(slurm.machines.received_bytes(name) - sent > num_bytes > 0 for name, sent in before.items())
    assert_same_run(run, uninterrupted(*args))


def test_a_failed_job_is_not_requeued_and_wait_has_its_exit_code(
    slurm, recipe: tuple[str, ...], tmp_path: Path
) -> None:
    args = (*recipe, STEPS, f"data.source.root={tmp_path}")
    options = ("--engine", "slurm", "--nodes", "2", "--run-dir", "run", "--wait", "--json")
    completed = slurm.paceline("submit", *args, *options, folder=tmp_path)
    assert completed.returncode == 2, (completed.stdout, completed.stderr)
    job = json.loads(completed.stdout.splitlines()[-1])["job_id"]
    facts = slurm.facts(job)
    assert (facts["JobState"], facts["Restarts"], facts["ExitCode"]) == ("FAILED", "0", "2:0")
    assert f"error: data.source.root: {tmp_path} has no Fashion-MNIST" in slurm.output(job)


def test_an_invalid_job_script_ends_without_requeueing(slurm, recipe: tuple[str, ...], tmp_path: Path) -> None:
    args = (*recipe, STEPS, "--engine", "slurm", "--nodes", "2", "--run-dir", "run", "--dry-run")
    script = slurm.paceline("submit", *args, folder=tmp_path).stdout
    edited = script.replace(" --resume", " --resume data.batch_size=13")
    assert edited != script
    (tmp_path / "job.sh").write_text(edited)
    # The recipe that the script trains was never written, because nobody submitted the run.
    job = slurm("sbatch", "--parsable", f"--chdir={tmp_path}", f"--output={tmp_path}/%j.out", str(tmp_path / "job.sh"))
    facts = slurm.wait_for_state(job, "FAILED")
    assert facts["Restarts"] == "0"
    assert "error: " in slurm.output(job)
